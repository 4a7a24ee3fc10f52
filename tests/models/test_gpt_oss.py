"""gpt-oss's own form of weights: experts in MXFP4, in safetensors and in GGUF files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import radixrt_kernels
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.native import BlockExperts, NativeKernels
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.quantization.blocks import Mxfp4Stack
from radixrt.layers.weights import weight_bytes
from radixrt.models.checkpoint import check_checkpoint, resolve_model_path
from radixrt.models.decoder import CausalLM
from radixrt.models.gguf.config import generation_config
from radixrt.models.gguf.file import GGUFFile
from radixrt.models.loader import load_model
from radixrt_kernels import blockwise
from radixrt_kernels.reference import blockwise as reference
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.models.harness import Harness

torch.set_num_threads(1)
PROMPT = list(range(3, 33))
SIZES = {"hidden_size": 64, "intermediate_size": 128}


def in_mxfp4(plain: Path, folder: Path) -> tuple[Path, Path]:
    """A checkpoint with experts of random blocks, and the plain one that means the same by
    transformers' conversion."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    quantized, twin = folder / "mxfp4", folder / "twin"
    for copy in (quantized, twin):
        shutil.copytree(plain, copy)
    tensors = load_file(plain / "model.safetensors")
    packed, meant = dict(tensors), dict(tensors)
    torch.manual_seed(1)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert meant[name].shape == tensor.shape
    save_file(packed, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    }  # fmt: skip
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, twin


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("gpt_oss")
    return in_mxfp4(make_checkpoint("gpt_oss", folder / "plain", **SIZES), folder)


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return Harness(load_model(folder, **options), 16).logits(PROMPT)


def native(folder: Path, **options: Any) -> CausalLM:
    if not radixrt_kernels.available():
        pytest.skip(f"no native kernels: {radixrt_kernels.missing_because}")
    return load_model(folder, kernels=NativeKernels(), **options)


def test_a_checkpoint_in_mxfp4_means_what_transformers_makes_of_it(
    pair: tuple[Path, Path],
) -> None:
    quantized, twin = pair
    assert check_checkpoint(quantized)["quantization_config"]["quant_method"] == "mxfp4"
    model, plain = load_model(quantized), load_model(twin)
    assert model.num_parameters == plain.num_parameters
    stacks = {path: m for path, m in model.named_modules() if isinstance(m, Mxfp4Stack)}
    assert len(stacks) == 2 * len(model.model.layers)
    for path, stack in stacks.items():
        expected = plain.get_submodule(path).weight
        assert torch.equal(stack.plain(slice(None)), expected)
        assert torch.equal(stack.dequantized().weight, expected)  # as on a GPU
    assert torch.equal(logits(quantized), logits(twin))
    with pytest.raises(ConfigError, match=r"quantized already \(mxfp4"):
        load_model(quantized, quantization="int8")


def test_the_native_kernels_multiply_by_the_blocks(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, twin = pair
    model, unrounded = native(quantized), logits(twin)
    experts = model.model.layers[0].mlp.experts
    for stack in (experts.gate_up_proj, experts.down_proj):
        assert isinstance(stack.matrix, BlockExperts)
    biases = experts.gate_up_proj.bias.nbytes + experts.down_proj.bias.nbytes
    assert weight_bytes(experts) - biases <= 1.1 * 6 * 3 * 64 * 128 * 17 / 32
    check_rounding(model, unrounded, monkeypatch)


def check_rounding(
    model: CausalLM, unrounded: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products with experts are those of decoded weights and rounded activations."""
    result = Harness(model, 16).logits(PROMPT)

    def by_each(hidden, tokens, starts, stack, bias, output):  # type: ignore[no-untyped-def]
        inputs = hidden if tokens is None else hidden[tokens.long()]
        parts = [
            reference.linear(
                own, [blockwise.PackedBlocks(packed, stack.kind, stack.rows, stack.columns)], each
            )
            for own, packed, each in zip(
                inputs.split(starts.diff().tolist()), stack.packed, bias, strict=True
            )
        ]
        return torch.cat(parts)

    monkeypatch.setattr(blockwise, "grouped_linear", by_each)
    expected = Harness(model, 16).logits(PROMPT)
    assert rms(result - expected) < 0.02 * expected.std()
    errors = (result - unrounded).square().mean(dim=-1).sqrt()
    assert errors.median() < 0.15 * unrounded.std()


def rms(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.square().mean().sqrt()


def test_each_rank_holds_its_part_of_the_experts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    quantized, _ = pair
    whole = load_model(quantized)
    ranks = [load_model(quantized, tp=TensorParallel(rank, 2)) for rank in range(2)]
    for index, layer in enumerate(whole.model.layers):
        ours = layer.mlp.experts
        theirs = [rank.model.layers[index].mlp.experts for rank in ranks]
        for expert in range(6):
            halves = [each.gate_up_proj.plain(expert).chunk(2) for each in theirs]
            merged = [torch.cat([half[i] for half in halves]) for i in range(2)]
            assert torch.equal(torch.cat(merged), ours.gate_up_proj.plain(expert))
            parts = [each.down_proj.plain(expert) for each in theirs]
            assert torch.equal(torch.cat(parts, dim=1), ours.down_proj.plain(expert))
        biases = sum(each.down_proj.bias for each in theirs)
        assert torch.equal(biases, ours.down_proj.bias)
        sinks = torch.cat([rank.model.layers[index].self_attn.sinks.scores for rank in ranks])
        assert torch.equal(sinks, layer.self_attn.sinks.scores) and sinks.any()
    folder = make_checkpoint("gpt_oss", tmp_path / "plain")  # 96 features
    with pytest.raises(ConfigError, match=r"96 input features .* blocks of 32 \(MXFP4\)"):
        load_model(in_mxfp4(folder, tmp_path)[0], tp=TensorParallel(0, 2))


def test_random_weights_take_the_place_of_a_checkpoint_in_mxfp4(pair: tuple[Path, Path]) -> None:
    model = native(pair[0], load_format="dummy")
    assert weight_bytes(model) < 0.5 * weight_bytes(load_model(pair[1]))
    assert Harness(model, 16).logits(PROMPT).isfinite().all()


def test_another_activation_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, swiglu_limit=5.0)
    with pytest.raises(ConfigError, match=r"swiglu_limit 5\.0; 1\.702 and 7\.0 are supported"):
        load_model(folder)


# ---------------------------------------------------------------- GGUF


def kind(name: str) -> Any:
    """As in the published files: the router is never quantized."""
    gguf = pytest.importorskip("gguf")
    kinds = {".experts.": "MXFP4", ".router.": "F32"}
    found = next((kinds[part] for part in kinds if part in name), "Q8_0")
    return gguf.GGMLQuantizationType[found]


@pytest.fixture
def gguf_file(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pytest.importorskip("gguf")
    from tests.models.gguf_files import write_gguf

    folder = shutil.copytree(pair[1], tmp_path / "twin")
    make_tokenizer(folder)
    return write_gguf(folder, tmp_path / "tiny.gguf", kind=kind)


def test_a_gguf_file_has_the_same_experts(
    pair: tuple[Path, Path],
    gguf_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = resolve_model_path(str(gguf_file))
    plain = load_model(served, dtype="float32")
    theirs = load_model(pair[0])
    for index, layer in enumerate(theirs.model.layers):
        ours = plain.model.layers[index]
        for name in ("gate_up_proj", "down_proj"):
            stack, expected = getattr(ours.mlp.experts, name), getattr(layer.mlp.experts, name)
            for expert in range(6):
                assert torch.equal(stack.plain(expert), expected.plain(expert))
            assert torch.equal(stack.bias, expected.bias)
        assert torch.equal(ours.self_attn.sinks.scores, layer.self_attn.sinks.scores)
    caplog.clear()
    model = native(served, dtype="float32")
    assert "dequantized" not in caplog.text
    assert isinstance(model.model.layers[0].mlp.experts.down_proj.matrix, BlockExperts)
    check_rounding(model, Harness(plain, 16).logits(PROMPT), monkeypatch)


def test_the_end_of_a_message_ends_no_answer() -> None:
    tokens = ["a", "<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "<|start|>"]
    meta = {"tokens": tokens, "token_type": [1, 3, 3, 3, 3, 3], "eos_token_id": 1}
    prefixed = {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
    assert generation_config(GGUFFile(prefixed, {}, []))["eos_token_id"] == [1, 3, 4]
