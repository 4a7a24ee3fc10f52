"""Files and folders that cannot be served are refused at once, with the reason and what to do."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.cli.doctor.models import model_finding
from radixrt.models import memory_need
from radixrt.supervisor.launch import prepare
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.models.gguf_files import write_gguf
from tests.servers.fake_hub import FakeHub

LIMIT_S = 5.0
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n"


def _edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _only(folder: Path, name: str, content: bytes) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / name).write_bytes(content)


def _weights(folder: Path, change: Callable[[bytes], bytes]) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(change(file.read_bytes()))


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda f: [file.unlink() for file in f.iterdir()], "holds no config.json.* a GGUF file"),
    "truncated": (lambda f: _weights(f, lambda data: data[:-99]), "damaged.*Download it again"),
    "garbage": (lambda f: _weights(f, lambda data: os.urandom(len(data))), "damaged.*Download it again"),
    "pointer": (lambda f: _weights(f, lambda data: LFS), "git lfs pull"),
    "no_weights": (lambda f: (f / "model.safetensors").unlink(), "holds no weights.*Download them"),
    "pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pickle.*convert it"),
    "shard": (lambda f: (f / "model.safetensors.index.json").write_text(json.dumps(INDEX)), "lacks 1 of the 1.*Download"),
    "shape": (lambda f: _edit(f, hidden_size=48), "embed_tokens.weight has the shape .*hidden_size' is 48.*Take both"),
    "architecture": (lambda f: _edit(f, architectures=["DeepseekV32ForCausalLM"]), "Not yet: DeepseekV32.*indexer.*nearest supported model is deepseek-ai/"),
    "adapter": (lambda f: _only(f, "adapter_config.json", b"{}"), "LoRA adapter.*Merge it"),
    "gguf_folder": (lambda f: _only(f, "m.gguf", b"GGUF"), "holds GGUF files. Give one of them: .*m.gguf"),
}  # fmt: skip
FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda data: data[:-64], "ends before the data.*Download it again"),
    "magic": (lambda data: b"PK" + data[2:], "does not begin with GGUF.*Download it again"),
    "header": (lambda data: data[:24] + os.urandom(len(data) - 24), "damaged.*Download it again"),
    "pointer": (lambda data: LFS, "git lfs pull"),
    "hybrid": (lambda data: data.replace(b"qwen3", b"jamba"), r"Not yet: jamba .*nearest supported model is Qwen/Qwen3.5-4B"),
    "part-00001-of-00002": (lambda data: data, "lacks 1 of the 2 files.*00002-of-00002.gguf. Download it"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RADIXRT_CACHE", raising=False)


def refused(path: Path | str, reason: str) -> None:
    """Check that a server is refused within the limit, and that the doctor gives the same reason."""
    begin = time.process_time()
    with pytest.raises(ConfigError, match=rf"(?s){reason}"):
        prepare(ServerConfig(model_path=str(path), device="cpu"))
    assert time.process_time() - begin < LIMIT_S
    with pytest.raises(ConfigError, match=rf"(?s){reason}"):
        raise ConfigError(model_finding(str(path)).fact)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    make_tokenizer(folder)
    return write_gguf(folder, folder / "m.gguf").read_bytes()


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_served_is_refused_at_once(
    checkpoint: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    change, reason = FOLDERS[name]
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    prepare(ServerConfig(model_path=str(folder), device="cpu"))
    change(folder)
    refused(folder, reason)


@pytest.mark.parametrize("name", FILES)
def test_a_gguf_file_that_cannot_be_served_is_refused_at_once(
    file: bytes, tmp_path: Path, name: str
) -> None:
    change, reason = FILES[name]
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(change(file))
    refused(path, reason)


@pytest.mark.parametrize(
    ("number", "kind"), [(144, "IQ4_KS"), (339, "IQ4_K_R4"), (499, "number 499")]
)
def test_kinds_of_weights_of_forks_are_refused_by_name(
    tmp_path: Path, number: int, kind: str
) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_tensor_info("token_embd.weight", (4, 256), np.dtype(np.float32), 4096)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    data = path.read_bytes()
    place = data.index(b"token_embd.weight") + 17 + 4 + 2 * 8
    path.write_bytes(data[:place] + number.to_bytes(4, "little") + data[place + 4 :] + bytes(9999))
    refused(path, rf"Not yet: weights of the kind {kind}.*such as Q4_K_M")


def test_a_model_that_does_not_fit_is_refused_with_both_numbers(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_need, "available_memory", lambda: 100_000_000)
    refused(checkpoint("llama"), r"needs at least .* GB.*0\.1 GB are available.*smaller model")


@pytest.mark.parametrize("name", ["maker/hybrid", "hf:maker/packed", "maker/adapter"])
def test_a_model_of_the_hub_is_refused_before_it_is_downloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    config = json.dumps({"architectures": ["JambaForCausalLM"]}).encode()
    with FakeHub(
        hybrid={"config.json": config, "model.safetensors": bytes(999)},
        packed={"m-Q4_K_M.gguf": bytes(999)},
        adapter={"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(9)},
    ) as hub:
        hub.packed_architectures["maker/packed"] = "jamba"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        refused(name, "Merge it" if "adapter" in name else "Not yet: .*nearest supported model is")
        assert not hub.downloads
