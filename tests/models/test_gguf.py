"""GGUF files give the logits of the same weights in safetensors, and the tokens of the tokenizer they were written from."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.layers.weights import weight_bytes
from radixrt.models.checkpoint import check_checkpoint, generation_config, resolve_model_path
from radixrt.models.gguf import weights
from radixrt.models.loader import load_model
from tests.checkpoints import END_OF_TURN, make_checkpoint, make_tokenizer
from tests.models.harness import Harness
from tests.models.test_against_transformers import PROMPT
from tests.tiny_tokenizers import TEXT, save_byte_fallback, save_byte_level

gguf = pytest.importorskip("gguf")

torch.set_num_threads(1)

FAMILIES: dict[str, tuple[str, dict[str, Any], float]] = {
    # llama.cpp keeps no window for Mistral and Qwen 2; the converter rounds Llama 3's and LongRoPE's factors to float32
    "llama": ("llama", {}, 1e-5),
    "llama_biased_tied": ("llama_biased_tied", {}, 0),
    "mistral": ("mistral", {"sliding_window": None}, 0),
    "qwen2": ("qwen2", {"use_sliding_window": False}, 0),
    "qwen2_yarn": ("qwen2_yarn", {}, 0),
    "qwen3": ("qwen3", {}, 0),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}, 0),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 24}, 0),
    "phi3": ("phi3", {}, 0),
    "phi3_long": ("phi3_long", {}, 1e-5),
}
"""Checkpoint of ``tests/checkpoints.py``, what of it GGUF cannot say, and the largest difference of a logit."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "radixrt" / "gguf"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Make a checkpoint and the GGUF file of it."""
    from tests.models.gguf_files import write_gguf

    def make(architecture: str, overrides: dict[str, Any], **settings: Any) -> tuple[Path, Path]:
        folder = make_checkpoint(architecture, tmp_path / architecture, **overrides)
        make_tokenizer(folder)
        return folder, write_gguf(folder, tmp_path / "tiny.gguf", **settings)

    return make


def logits(folder: Path) -> torch.Tensor:
    return Harness(load_model(folder, dtype="float32"), 16).logits(PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_equal_those_of_safetensors(
    family: str, make: Callable[..., tuple[Path, Path]]
) -> None:
    architecture, overrides, tolerance = FAMILIES[family]
    folder, file = make(architecture, overrides)
    served = resolve_model_path(str(file))
    assert check_checkpoint(served)["dtype"] == "float32"
    torch.testing.assert_close(logits(served), logits(folder), atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0", "F16", "BF16"])
def test_dequantized_logits_equal_those_of_the_dequantized_weights(
    kind: str, make: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        weights, "_CHUNK", 320
    )  # five rows of 64: several parts, the last one short
    kind = gguf.GGMLQuantizationType[kind]
    folder, file = make("llama", {}, kind=kind)
    served = resolve_model_path(str(file))
    assert check_checkpoint(served)["dtype"] == ("float16" if kind.name == "F16" else "bfloat16")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            rounded = gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind)
            tensors[name] = torch.from_numpy(rounded.copy())
    save_file(tensors, folder / "model.safetensors")
    torch.testing.assert_close(logits(served), logits(folder), atol=1e-5, rtol=0)


# Tokenizers


def texts() -> list[str]:
    """Words, odd whitespace, other scripts, digits, code and control tokens as text."""
    rng = random.Random(5)
    words = " ".join(TEXT).split(" ")
    pieces = [*words, " ", "  ", "\n", "\n\n", "\t", "\r\n", "12345", "e\u0301", "'ll", "<s>",
              "<|im_end|>", "<tool_call>", "▁", "😀", "x=1;", ""]  # fmt: skip
    return ["", *TEXT, *("".join(rng.choices(pieces, k=rng.randrange(1, 20))) for _ in range(300))]


def assert_same_tokens(folder: Path, expected: Tokenizer) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in texts():
        ids = expected.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == expected.decode(ids)


def test_byte_level_tokenizer_and_chat_template(tmp_path: Path) -> None:
    from tests.models.gguf_files import write_gguf

    folder = make_checkpoint("qwen3", tmp_path / "model", vocab_size=410)
    save_byte_level(folder)
    served = resolve_model_path(str(write_gguf(folder, tmp_path / "tiny.gguf")))
    assert_same_tokens(served, Tokenizer.from_file(str(folder / "tokenizer.json")))
    template = (folder / "chat_template.jinja").read_text()
    assert (served / "chat_template.jinja").read_text() == template


def test_qwen_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    from tests.models.gguf_files import write_gguf

    folder = make_checkpoint("qwen3", tmp_path / "model", vocab_size=410)
    save_byte_level(folder)
    tables = json.loads((folder / "tokenizer.json").read_text())
    merges = [tuple(merge) for merge in tables["model"]["merges"]]
    theirs = Qwen2Tokenizer(vocab=tables["model"]["vocab"], merges=merges).backend_tokenizer
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected.pre_tokenizer, expected.normalizer = theirs.pre_tokenizer, theirs.normalizer
    served = resolve_model_path(str(write_gguf(folder, tmp_path / "tiny.gguf", pre="qwen2")))
    assert_same_tokens(served, expected)


def test_llama_3_tokenizer_groups_three_digits_and_begins_with_bos(tmp_path: Path) -> None:
    from tests.models.gguf_files import write_gguf

    folder = make_checkpoint("llama", tmp_path / "model", vocab_size=410)
    make_tokenizer(folder)
    served = resolve_model_path(str(write_gguf(folder, tmp_path / "tiny.gguf", pre="llama-bpe")))
    ours = Tokenizer.from_file(str(served / "tokenizer.json"))
    cut = ours.pre_tokenizer.pre_tokenize_str("It's 12345 km,\n\nOK")
    assert [piece for piece, _ in cut] == ["It", "'s", "Ġ", "123", "45", "Ġkm", ",ĊĊ", "OK"]
    assert ours.encode("a").ids[0] == ours.token_to_id("<|endoftext|>")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer(tmp_path: Path, prefix: bool) -> None:
    from radixrt.models.gguf.file import read_header
    from radixrt.models.gguf.tokenizer import write_tokenizer
    from tests.models.gguf_files import write_sentencepiece

    folder = save_byte_fallback(tmp_path)
    file = write_sentencepiece(folder, tmp_path / "t.gguf", add_space_prefix=prefix)
    (made := tmp_path / "made").mkdir()
    write_tokenizer(read_header(file), made)
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not prefix:
        expected.normalizer = normalizers.Replace(" ", "\u2581")
    ours = Tokenizer.from_file(str(made / "tokenizer.json"))
    for text in texts():
        assert ours.encode(text).ids == expected.encode(text).ids, text
    assert ours.decode(ours.encode(" two  spaces").ids) == " two  spaces"


# Files


def test_end_tokens_are_those_of_the_file_and_of_its_control_tokens(
    make: Callable[..., tuple[Path, Path]],
) -> None:
    _, file = make("qwen3", {})
    assert generation_config(resolve_model_path(str(file)))["eos_token_ids"] == [0, END_OF_TURN]


def test_the_folder_is_made_once_and_again_for_a_changed_file(
    make: Callable[..., tuple[Path, Path]], cache: Path
) -> None:
    _, file = make("qwen3", {})
    first = resolve_model_path(str(file))
    made = (first / "config.json").stat().st_mtime_ns
    assert resolve_model_path(str(file)) == first
    assert (first / "config.json").stat().st_mtime_ns == made
    with file.open("ab") as end:
        end.write(b"\0")
    with pytest.raises(ConfigError, match="has changed"):
        load_model(first)
    assert resolve_model_path(str(file)) != first
    assert len(list(cache.glob("*/tiny"))) == 2


def test_quantized_weights_are_dequantized_with_a_warning_and_can_be_rounded(
    make: Callable[..., tuple[Path, Path]], caplog: pytest.LogCaptureFixture
) -> None:
    from radixrt.supervisor.launch import prepare

    folder, file = make("qwen3", {}, kind=gguf.GGMLQuantizationType.Q8_0)
    served = Path(prepare(ServerConfig(model_path=str(file))).model_path)
    assert "--quantization int8" in caplog.text
    caplog.clear()
    prepare(ServerConfig(model_path=str(file), quantization="int8"))
    assert caplog.text == ""
    rounded = weight_bytes(load_model(served, quantization="int8"))
    assert rounded < 0.6 * weight_bytes(load_model(served))
    assert weight_bytes(load_model(served)) == weight_bytes(load_model(folder, dtype="bfloat16"))


def test_without_the_package_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        resolve_model_path(str(tmp_path / "m.gguf"))


def test_a_model_in_several_files(make: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    from tests.models.gguf_files import write_gguf

    folder, _ = make("qwen3", {})
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    write_gguf(folder, parts[0], part=(0, 2))
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 files of m: m-00002-of-00002\.gguf"):
        resolve_model_path(str(parts[0]))
    write_gguf(folder, parts[1], part=(1, 2))
    assert torch.equal(logits(resolve_model_path(str(parts[0]))), logits(folder))


def test_files_that_cannot_be_served_are_refused_with_the_reason(
    make: Callable[..., tuple[Path, Path]], tmp_path: Path, cache: Path
) -> None:
    _, file = make("qwen3", {})
    data = file.read_bytes()
    for name, damaged, reason in [
        ("cut", data[:-64], "it ends before the data of"),
        ("header", data[:400], "within its header"),
        ("other", b"PK" + data[2:], "does not begin with GGUF"),
        ("empty", b"", "no readable GGUF file"),
        ("moe", data.replace(b"qwen3", b"mamba"), r"'mamba', which is not served.*qwen3"),
        ("pre", data.replace(b"gpt-2", b"gpt-9"), r"pre-tokenizer 'gpt-9' is not supported"),
    ]:
        (tmp_path / f"{name}.gguf").write_bytes(damaged)
        with pytest.raises(ConfigError, match=reason):
            resolve_model_path(str(tmp_path / f"{name}.gguf"))
    assert not list(cache.glob("*/*"))  # nothing half made stays behind
