"""Bundles: KV that is exported on one directory and imported into another."""

import random
from pathlib import Path

import pytest

from radixrt import LLM, SamplingParams
from radixrt.base.errors import ConfigError
from radixrt.kv.store.directory import CacheDirectory
from radixrt.scheduler.disk.bundle import import_bundle, read_bundle
from radixrt.worker.fingerprint import machine_parts
from tests.command_line import run_here

DOCUMENTS = [
    "The owner of Vidur is Noval. The port of Vidur is Teska. The fee of Vidur is 42. " * 2,
    "The owner of Vidur is Noval. The port of Vidur is Teska. Another harbor is Karas. " * 2,
]
SHORT = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)


def radixrt(*arguments: object) -> str:
    """What a command that succeeds prints."""
    done = run_here(*map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    files = []
    for number, text in enumerate(DOCUMENTS):
        files.append(folder / f"{number}.txt")
        files[-1].write_text(text)
    out = folder / "out.rdx"
    said = radixrt("cache", "export", out, "--prefix", *files, "--log-level", "warning")
    assert "tokens of KV" in said
    return out


def test_imported_kv_has_the_bits_of_a_cold_engine(
    bundle: Path, tmp_path: Path, demo_llm: LLM
) -> None:
    cache = tmp_path / "cache"
    assert "pages of KV added" in radixrt("cache", "import", bundle, "--cache-dir", cache)
    assert "0.txt" in radixrt("cache", "info", bundle)
    assert "tokens" in radixrt("cache", "info", cache)
    expected = demo_llm.generate(DOCUMENTS, SHORT)  # which has no directory
    with LLM(cache_dir=str(cache)) as llm:
        found = llm.generate(DOCUMENTS, SHORT)
        salted = llm.generate(DOCUMENTS[0], SHORT, cache_salt="other")
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [x.logprob for x in one.answers[0].logprobs] == [
            x.logprob for x in other.answers[0].logprobs
        ]
        assert one.cached_tokens == 16 * ((one.num_prompt_tokens - 1) // 16)
    assert found[0].answers[0].disk_tokens > 0 and salted.cached_tokens == 0


def test_a_program_names_a_bundle_and_has_its_kv(bundle: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with LLM(cache_dir=cache, cache_bundle=str(bundle)) as llm:
        answer = llm.generate(DOCUMENTS[0], SHORT).answers[0]
        assert answer.disk_tokens == 16 * ((answer.prompt_tokens - 1) // 16)
    with pytest.raises(ConfigError, match="made with another quantization"):
        LLM(cache_dir=cache, cache_bundle=str(bundle), quantization="int8")
    with pytest.raises(ConfigError, match="give --cache-dir"):
        LLM(cache_bundle=str(bundle))


def test_a_bundle_is_added_once(bundle: Path, tmp_path: Path) -> None:
    here = machine_parts()
    added = import_bundle(bundle, tmp_path / "cache", 1.0, here)
    head, pages, file = read_bundle(bundle)
    file.close()
    assert added == len(pages) == head.num_pages and head.titles == ["0.txt", "1.txt"]
    assert import_bundle(bundle, tmp_path / "cache", 1.0, here) == 0


def test_other_kernels_are_refused_by_name(bundle: Path, tmp_path: Path) -> None:
    for name in machine_parts():
        with pytest.raises(ConfigError, match=f"made with another {name}"):
            import_bundle(bundle, tmp_path / "cache", 1.0, machine_parts() | {name: "other"})
    assert not (tmp_path / "cache").exists()


def test_damaged_bundles_are_refused(bundle: Path, tmp_path: Path) -> None:
    content, rng = bundle.read_bytes(), random.Random(5)
    copy = tmp_path / "copy.rdx"
    for number in range(60):
        damaged, at = bytearray(content), rng.randrange(len(content))
        if number % 3 == 0:
            del damaged[at:]
        elif number % 3 == 1:
            damaged[at] ^= 1 << rng.randrange(8)
        else:
            damaged[at:at] = b"\0"
        copy.write_bytes(damaged)
        with pytest.raises(ConfigError):
            import_bundle(copy, tmp_path / "cache", 1.0, {})
    assert not (tmp_path / "cache").exists()


def test_a_directory_in_use_is_refused(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("radixrt.kv.store.directory.LOCK_PATIENCE_S", 0.0)
    head, _, file = read_bundle(bundle)
    file.close()
    owned = CacheDirectory.own(tmp_path / "cache", head.parts)
    with pytest.raises(ConfigError, match="uses the cache of this model"):
        import_bundle(bundle, tmp_path / "cache", 1.0, {})
    owned.close()
