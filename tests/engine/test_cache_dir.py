"""KV that outlives the engine: the same bits as a cold engine computes, whatever happened to the
files, and no use of KV that another model, machine or tenant has left."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import radixrt_kernels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.kv.store.directory import fingerprint_of
from radixrt.messages.sequences import PositionLogprobs
from radixrt.models.eagle3 import Eagle3Head
from radixrt.worker.fingerprint import file_digest, machine_cpu, machine_parts, stats_of_files
from tests.checkpoints import make_checkpoint
from tests.checkpoints.draft_heads import make_head, watch_drafts
from tests.engine.in_process import InProcessEngine

SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
PROMPTS = [[(7 * i + k) % 90 for i in range(70 + 16 * k)] for k in range(3)]
Answers = tuple[list[list[int]], list[list[PositionLogprobs]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Answers:
    engine = InProcessEngine(model)
    return engine.generate(PROMPTS, SAMPLING), engine.logprobs


def engine_on(model: Path, folder: Path, **settings: object) -> InProcessEngine:
    return InProcessEngine(model, cache_dir=str(folder), cache_dir_gb=0.01, **settings)


def close(engine: InProcessEngine) -> None:
    assert engine.disk is not None
    engine.disk.close()


@pytest.fixture(scope="module")
def filled(model: Path, cold: Answers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the prompts' KV."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    engine = engine_on(model, folder)
    for _ in range(2):
        assert engine.generate(PROMPTS, SAMPLING) == cold[0]
    close(engine)
    return folder


@pytest.fixture
def kept(filled: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(filled, tmp_path / "cache"))


def files(folder: Path) -> tuple[Path, Path]:
    """The pages and the journal of the only replica."""
    (replica,) = folder.glob("*/r0")
    return replica / "pages", replica / "journal"


def answers(engine: InProcessEngine) -> Answers:
    return engine.generate(PROMPTS, SAMPLING), engine.logprobs


def test_a_new_engine_has_the_cache_of_the_last_one(model: Path, kept: Path, cold: Answers) -> None:
    engine = engine_on(model, kept)
    assert answers(engine) == cold
    assert engine.cached == [16 * ((len(prompt) - 1) // 16) for prompt in PROMPTS]
    close(engine)


@pytest.mark.parametrize(
    "family, kv_dtype", [("llama", "int8"), ("deepseek_v2", "auto"), ("qwen3_5", "auto")]
)
def test_the_bits_of_scales_latents_and_states_come_back(
    tmp_path: Path, family: str, kv_dtype: str
) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    plain = answers(InProcessEngine(model, kv_cache_dtype=kv_dtype))
    engine = engine_on(model, tmp_path / "cache", kv_cache_dtype=kv_dtype)
    for _ in range(2):
        assert answers(engine) == plain
    close(engine)
    engine = engine_on(model, tmp_path / "cache", kv_cache_dtype=kv_dtype)
    assert answers(engine) == plain and min(engine.cached) > 0
    close(engine)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_changes_no_bit(
    model: Path, kept: Path, cold: Answers, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(error, os.strerror(error))

    others = [[89 - token for token in prompt] for prompt in PROMPTS]
    engine = engine_on(model, kept)
    monkeypatch.setattr(f"radixrt.worker.kv.page_mover.os.{call}", fail)
    for _ in range(2):
        engine.generate(others, SAMPLING)
    assert answers(engine) == cold
    assert engine.disk is not None
    assert engine.disk.error == (os.strerror(error) if call == "pwrite" else "")
    assert engine.cached == [0] * 3 if call == "preadv" else min(engine.cached) > 0
    monkeypatch.undo()
    close(engine)


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 3, 200])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.truncate(rng.randrange(file.stat().st_size))


def make_hole(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.seek(rng.randrange(file.stat().st_size))
        opened.write(bytes(rng.choice([64, 4096])))


def replace(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(file.stat().st_size))


def remove(file: Path, rng: random.Random) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [flip, truncate, make_hole, replace, remove])
@pytest.mark.parametrize("which", ["pages", "journal"])
def test_damage_changes_no_bit(
    model: Path, kept: Path, cold: Answers, damage: Callable, which: str
) -> None:
    rng = random.Random(f"{damage.__name__} {which}")
    damage(files(kept)[which == "journal"], rng)
    for _ in range(2):  # what was damaged is written again
        engine = engine_on(model, kept)
        assert answers(engine) == cold
        close(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8"},
        {"page_size": 8},
        {"attention_backend": "torch_reference"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_other_settings_find_nothing(model: Path, kept: Path, settings: dict[str, object]) -> None:
    engine = engine_on(model, kept, **settings)
    assert engine.generate(PROMPTS[:1], SAMPLING) and engine.cached == [0]
    close(engine)


@pytest.mark.skipif(not radixrt_kernels.available(), reason="PyTorch computes everything")
def test_the_cpu_counts_where_torch_multiplies(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cpu(**settings: object) -> str:
        engine = engine_on(model, kept, **settings)
        close(engine)
        return engine.info.kv_parts["cpu"]

    assert cpu() == "" == cpu(quantization="int8")
    assert cpu(quantization="fp8") == machine_cpu() != ""
    assert cpu(attention_backend="torch_reference") == machine_cpu()
    monkeypatch.setattr(radixrt_kernels, "native", None)
    assert cpu() == machine_cpu()


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"])  # fmt: skip
def test_what_libraries_read_from_the_environment_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.delenv(name, raising=False)
    before = fingerprint_of(machine_parts())
    assert fingerprint_of(machine_parts()) == before
    monkeypatch.setenv(name, "AVX2")
    assert fingerprint_of(machine_parts()) != before


def test_versions_and_builds_of_libraries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine_parts()
    monkeypatch.setattr("torch.__config__.show", lambda: "another build")
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"another {name}")
    changed = {name for name, part in machine_parts().items() if part != before[name]}
    assert changed == {"torch", "transformers"}


def changed_weights(model: Path, folder: Path) -> Path:
    """A copy of a model in which one number is another, at the same size."""
    other = Path(shutil.copytree(model, folder))
    (file,) = other.glob("*.safetensors")
    weights = load_file(file)
    name = next(name for name in weights if "down_proj" in name)
    weights[name].view(torch.uint8).view(-1)[3] ^= 1
    save_file(weights, file, {"format": "pt"})
    return other


def test_other_weights_find_nothing(model: Path, kept: Path, tmp_path: Path) -> None:
    engine = engine_on(changed_weights(model, tmp_path / "other"), kept)
    engine.generate(PROMPTS[:1], SAMPLING)
    assert engine.cached == [0]
    close(engine)


def test_the_kv_of_a_draft_head_comes_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of prompts and of answers: the head goes on with the bits of one that was never
    stopped. Another head finds nothing, and none at all neither."""
    drafted = watch_drafts(monkeypatch, Eagle3Head)
    config = json.loads((model / "config.json").read_text())
    heads = [str(make_head(tmp_path / f"{seed}", config, seed=seed)) for seed in range(2)]
    settings: dict[str, Any] = {
        "speculation": "head", "draft_model": heads[0], "page_size": 4,
    }  # fmt: skip
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

    def drafts_of(engine: InProcessEngine, *, cached: bool) -> object:
        drafted.clear()
        for text in longer:
            engine.generate([text], SAMPLING)
            assert engine.cached == [cached * 4 * ((len(text) - 2) // 4)]
        return [(one.texts, [rows.tolist() for rows in one.logits]) for one in drafted]

    engine = engine_on(model, tmp_path / "cache", **settings)
    answers = engine.generate(PROMPTS, sampling)
    longer = [[*prompt, *answer, 7] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    for _ in range(2):  # pages that were used again are kept
        engine.generate(longer, SAMPLING)
    close(engine)
    cold = drafts_of(InProcessEngine(model, **settings), cached=False)
    assert len(drafted) > 3 * len(longer)
    engine = engine_on(model, tmp_path / "cache", **settings)
    assert drafts_of(engine, cached=True) == cold
    close(engine)
    for other in ({"draft_model": heads[1]}, {"draft_model": None, "speculation": "off"}):
        engine = engine_on(model, tmp_path / "cache", **{**settings, **other})
        engine.generate(longer, SAMPLING)
        assert engine.cached == [0, 0, 0]
        close(engine)


def test_a_pool_that_outlives_its_worker_is_dropped_where_the_head_changes(
    model: Path, tmp_path: Path
) -> None:
    head = make_head(tmp_path, json.loads((model / "config.json").read_text()))
    config = ServerConfig(model_path=str(model), draft_model=str(head), speculation="head")
    before = stats_of_files(config)
    assert stats_of_files(config) == before
    (head / "config.json").touch()
    assert stats_of_files(config) != before


def test_another_salt_finds_nothing(model: Path, kept: Path) -> None:
    engine = engine_on(model, kept)
    engine.generate(PROMPTS[:1], SAMPLING, salt="another")
    assert engine.cached == [0]
    close(engine)


def test_another_secret_finds_nothing(model: Path, kept: Path) -> None:
    (kept / "secret").unlink()
    engine = engine_on(model, kept)
    engine.generate(PROMPTS[:1], SAMPLING)
    assert engine.cached == [0]
    close(engine)


def test_files_of_another_model_are_not_taken_for_its_own(
    model: Path, kept: Path, cold: Answers, tmp_path: Path
) -> None:
    """Journal and pages of a model with other weights in the place of those of this one."""
    other = engine_on(changed_weights(model, tmp_path / "other"), kept)
    for _ in range(2):
        other.generate(PROMPTS, SAMPLING)
    close(other)
    folders = sorted(kept.glob("*/r0"), key=lambda one: one.stat().st_mtime)
    assert len(folders) == 2
    for name in ("pages", "journal"):
        shutil.copy(folders[1] / name, folders[0] / name)
    engine = engine_on(model, kept)
    assert answers(engine) == cold and engine.cached == [0, 0, 0]
    close(engine)


def test_one_engine_at_a_time_uses_a_directory(
    model: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixrt.kv.store.directory.LOCK_PATIENCE_S", 0.0)
    first = engine_on(model, kept)
    with pytest.raises(ConfigError, match="uses the cache of this model"):
        engine_on(model, kept)
    close(first)
    close(engine_on(model, kept))


def test_a_directory_that_others_can_read_is_refused(model: Path, kept: Path) -> None:
    kept.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        engine_on(model, kept)


def test_a_link_in_place_of_a_folder_is_refused(model: Path, kept: Path, tmp_path: Path) -> None:
    (replica,) = kept.glob("*/r0")
    replica.rename(tmp_path / "elsewhere")
    replica.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        engine_on(model, kept)


def test_a_file_is_hashed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    file, hashed = tmp_path / "weights", []

    def hash_file(file: Path) -> str:
        hashed.append(file)
        return file.read_text()

    file.write_text("one")
    assert file_digest(file, hash_file) == file_digest(file, hash_file) == "one"
    stat = file.stat()
    file.write_text("two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(file, hash_file) == "two" and len(hashed) == 2
