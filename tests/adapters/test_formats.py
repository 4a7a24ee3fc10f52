"""Adapters in GGUF files, and adapters of models whose weights are in other formats."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.cli.doctor.models import adapter_findings
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.linear import (
    ColumnParallelLinear,
    LinearLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from radixrt.layers.matrix import DecodableMatrix
from radixrt.layers.mlp import Experts
from radixrt.layers.quantization.fp8 import Fp8Matrix
from radixrt.messages.adapters import AdapterInfo
from radixrt.models.adapter_files.form import AdapterError
from radixrt.models.adapter_files.peft import read_folder
from radixrt.models.adapters import Adapter, ModelAdapters, read_adapter
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.decoder import CausalLM
from radixrt.models.gguf.file import read_header
from radixrt.models.loader import load_model
from tests.adapters.operations import Operations
from tests.adapters.peft_adapters import make_adapter
from tests.adapters.test_against_peft import PROMPT, logits
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.engine.in_process import InProcessEngine

gguf = pytest.importorskip("gguf")

from tests.adapters.gguf_adapters import write_adapter  # noqa: E402
from tests.models.gguf_files import write_gguf  # noqa: E402
from tests.models.test_gguf import EVERY_KIND, every_kind  # noqa: E402

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason="adapters are computed by the native kernels"
)

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GGUF_FAMILIES: dict[str, tuple[dict[str, Any], list[str] | None]] = {
    "llama": ({}, None),
    "phi3": ({}, None),
    "qwen3_moe": ({"mlp_only_layers": []}, EXPERTS),
    "lfm2": ({}, None),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_pair(
    family: str, folder: Path, invocation: list[int] | None = None, rank: int = 4
) -> tuple[Path, Path, Any]:
    """A checkpoint, an adapter of peft's and peft's model."""
    overrides, parameters = GGUF_FAMILIES[family]
    checkpoint = make_checkpoint(family, folder / "base", initializer_range=0.06, **overrides)
    make_tokenizer(checkpoint)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "o_proj"] if parameters else "all-linear",
        target_parameters=parameters,
        rank_pattern={r"experts\.down_proj": 2},
        alora_invocation_tokens=invocation,
        r=rank,
        lora_alpha=7,
    )
    return checkpoint, folder / "peft", make_adapter(checkpoint, folder / "peft", config)


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_an_adapter_in_a_gguf_file_is_that_of_peft(family: str, tmp_path: Path) -> None:
    """On the checkpoint and on its GGUF file, each with either adapter."""
    checkpoint, folder, theirs = make_pair(family, tmp_path)
    file = write_adapter(checkpoint, folder, tmp_path / "adapter.gguf")
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    served = resolve_model_path(str(write_gguf(checkpoint, tmp_path / "model.gguf")))
    found = []
    for base in (checkpoint, served):
        model = load_model(base, kernels=NativeKernels(), dtype="float32")
        adapters = ModelAdapters(model, num_adapters=2, max_rank=8)
        for place, path in enumerate((folder, file)):
            adapters.put(place, adapters.read(path))
            found.append(logits(model, adapters, place))
    for ours in found:
        assert (ours - expected).abs().max() < 2e-5
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])


def test_a_gguf_adapter_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint, folder, _ = make_pair("llama", tmp_path)
    model = load_model(checkpoint, kernels=NativeKernels())

    def refusal(path: Path) -> str:
        with pytest.raises(AdapterError) as caught:
            read_adapter(path, model, 8)
        return str(caught.value)

    def written(**fields: Any) -> Path:
        return write_adapter(checkpoint, folder, tmp_path / "one.gguf", **fields)

    assert "general.type is model" in refusal(written(kind="model"))
    assert "adapter.type is loha" in refusal(written(adapter_type="loha"))
    other, own, _ = make_pair("qwen3_moe", tmp_path / "other")
    assert "is for qwen3moe, and the model is llama" in refusal(
        write_adapter(other, own, tmp_path / "one.gguf")
    )
    (tmp_path / "one.gguf").write_bytes(written().read_bytes()[:400])
    assert "cannot be read" in refusal(tmp_path / "one.gguf")


def test_a_gguf_file_that_is_cut_or_replaced_while_it_is_read_is_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mapping of the file itself would end the process with SIGBUS."""
    checkpoint, folder, _ = make_pair("llama", tmp_path)
    model = load_model(checkpoint, kernels=NativeKernels())
    file = write_adapter(checkpoint, folder, tmp_path / "one.gguf")
    expected = read_adapter(file, model, 8).digest

    def read_header_then_cut(path: Path) -> Any:
        header = read_header(path)
        file.write_bytes(b"")
        return header

    monkeypatch.setattr("radixrt.models.adapter_files.gguf.read_header", read_header_then_cut)
    assert read_adapter(file, model, 8).digest == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"r": "four"}, "Expected `int"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"rank_pattern": {"(": 3}}, "unterminated subpattern"),
        ({"alora_invocation_tokens": ["a"]}, "no list of tokens"),
        ({"alora_invocation_tokens": [-1]}, "no list of tokens"),
        ({"alora_invocation_tokens": [1 << 31]}, "no list of tokens"),
    ],
)
def test_a_config_of_other_types_is_refused(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Before the scheduler looks for the invocation in prompts."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 7} | fields
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.ones(4, 8), f"{module}.lora_B.weight": torch.ones(8, 4)}  # fmt: skip
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=said):
        read_folder(tmp_path)


def test_a_digest_is_of_scalings_and_invocations(tmp_path: Path) -> None:
    checkpoint, folder, _ = make_pair("llama", tmp_path, invocation=[5, 6])
    model = load_model(checkpoint, kernels=NativeKernels())
    file = write_adapter(checkpoint, folder, tmp_path / "one.gguf")
    first = read_adapter(file, model, 8)
    assert first.invocation == (5, 6) == read_adapter(folder, model, 8).invocation
    settings = folder / "adapter_config.json"
    settings.write_text(settings.read_text().replace('"lora_alpha": 7', '"lora_alpha": 8'))
    scaled = read_adapter(write_adapter(checkpoint, folder, file), model, 8)
    assert scaled.digest != first.digest


def test_an_adapter_activated_in_latents_is_refused(tmp_path: Path) -> None:
    """A cached token's key would be computed by the adapter of the token that reads it."""
    checkpoint = make_checkpoint("deepseek_v3", tmp_path / "base")
    model = load_model(checkpoint, kernels=NativeKernels())
    for name, modules in (("one", ["q_b_proj", "kv_b_proj"]), ("other", ["q_b_proj"])):
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=modules, r=4, alora_invocation_tokens=[5]
        )
        make_adapter(checkpoint, tmp_path / name, config)
    with pytest.raises(AdapterError, match="kv_b_proj"):
        read_adapter(tmp_path / "one", model, 8)
    assert read_adapter(tmp_path / "other", model, 8).invocation == (5,)


def test_heads_in_the_order_of_gguf_files(tmp_path: Path) -> None:
    """Of Qwen3.5's linear attention, with peft's adapter of the checkpoint."""
    checkpoint = make_checkpoint("qwen3_5", tmp_path / "base", initializer_range=0.06)
    make_tokenizer(checkpoint)
    theirs = make_adapter(checkpoint, tmp_path / "lora", None)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    served = resolve_model_path(str(write_gguf(checkpoint, tmp_path / "model.gguf")))
    model = load_model(served, kernels=NativeKernels(), dtype="float32")
    adapters = ModelAdapters(model, num_adapters=1, max_rank=8)
    adapters.put(0, adapters.read(tmp_path / "lora"))
    assert (logits(model, adapters, 0) - expected).abs().max() < 2e-5


def test_weights_that_the_converter_multiplies_are_refused(tmp_path: Path) -> None:
    """The constants are not in the file, so an adapter of the checkpoint can't have them."""
    checkpoint = make_checkpoint("falcon_h1", tmp_path / "base")
    make_tokenizer(checkpoint)
    make_adapter(checkpoint, tmp_path / "lora", None)
    served = resolve_model_path(str(write_gguf(checkpoint, tmp_path / "model.gguf")))
    with pytest.raises(AdapterError, match="Falcon-H1"):
        read_adapter(tmp_path / "lora", load_model(served, kernels=NativeKernels()), 8)


def test_experts_that_are_not_those_of_the_model_are_refused(tmp_path: Path) -> None:
    checkpoint, _, _ = make_pair("qwen3_moe", tmp_path)
    model = load_model(checkpoint, kernels=NativeKernels())
    for count in (4, 8):
        other = make_checkpoint("qwen3_moe", tmp_path / f"{count}", num_experts=count)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=[], target_parameters=EXPERTS[:1], r=4
        )
        make_adapter(other, tmp_path / "few", config)
        with pytest.raises(AdapterError, match="experts"):
            read_adapter(tmp_path / "few", model, 8)


def test_doctor_says_whether_an_adapter_fits(tmp_path: Path) -> None:
    checkpoint, folder, _ = make_pair("llama", tmp_path, invocation=[5, 6], rank=80)
    file = write_adapter(checkpoint, folder, tmp_path / "one.gguf")
    other, own, _ = make_pair("qwen3_moe", tmp_path / "other")
    given = [f"plain={folder}", f"file={file}", f"wrong={own}", f"none={tmp_path / 'none'}"]
    plain, same, wrong, none = adapter_findings(str(checkpoint), given)
    assert plain.level == "ok" and "21 projections" in plain.fact and "rank 80" in plain.fact
    assert "activated" in plain.fact and plain.advice == "Serve it with --max-lora-rank 80."
    assert same.fact == plain.fact.replace("plain", "file")
    assert wrong.level == "error" and "is no linear layer of this model" in wrong.fact
    assert none.level == "error" and "no such folder or file" in none.fact
    (mixture,) = adapter_findings(str(other), [f"own={own}"])
    assert mixture.level == "ok", mixture.fact
    (finding,) = adapter_findings(str(checkpoint), ["=x"])
    assert finding.level == "error" and "NAME=PATH" in finding.fact


# ------------------------------------------------------------ weight formats


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("llama", {}),
    "int4": ("llama", {}),
    "fp8": ("llama", {}),
    "int8, experts": ("qwen3_moe", {}),
    "int4, experts": ("qwen3_moe", {}),
    "GGUF, every kind": ("qwen3_moe", EVERY_KIND),
}
"""Checkpoints by the format of their weights."""


def served_in(form: str, checkpoint: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint in a format of weights: the folder, and the settings."""
    if not form.startswith("GGUF"):
        return checkpoint, {"dtype": "float32", "quantization": form.partition(",")[0]}
    file = write_gguf(checkpoint, folder / "model.gguf", kind=every_kind)
    return resolve_model_path(str(file)), {"dtype": "float32"}


def plain(matrix: Any, rows: slice) -> torch.Tensor:
    if isinstance(matrix, Fp8Matrix):
        return matrix.codes[rows].float() * matrix.scales[rows, None]
    assert isinstance(matrix, DecodableMatrix)
    return matrix.plain(rows)


def decoded(model: CausalLM) -> dict[str, torch.Tensor]:
    """The weights of a model that PyTorch computes, by their names in the checkpoint."""
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, LinearLayer):
            for placement in layer.placements(path):
                found[placement.name] = plain(layer.matrix, placement.rows)
        elif isinstance(layer, VocabParallelEmbedding):
            found[path] = plain(layer.matrix, slice(0, layer.vocab_size))
        elif isinstance(layer, Experts):
            for expert in range(layer.num_experts):
                wide, down = layer.placements(f"{path}.{expert}", expert)
                for placement in wide:
                    found[placement.name] = plain(layer.gate_up_proj.matrix, placement.rows)
                found[down.name] = plain(layer.down_proj.matrix, down.rows)
    return {f"{name}.weight": weight.contiguous() for name, weight in found.items()}


def write_decoded(checkpoint: Path, served: Path, settings: dict[str, Any], folder: Path) -> Path:
    """The checkpoint whose plain weights are what the quantized ones mean."""
    weights = decoded(load_model(served, kernels=LayerKernels(), **settings))
    shutil.copytree(checkpoint, folder)
    tensors = load_file(checkpoint / "model.safetensors")
    replaced = {name: weights.pop(name) for name in tensors if name in weights}
    assert not weights, f"{[*weights]} are not in the checkpoint"
    save_file(tensors | replaced, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("form", FORMATS)
def test_adapters_of_weights_in_every_format_are_those_of_peft(form: str, tmp_path: Path) -> None:
    """The products of an adapter are in float32, whatever the weights are in; what is apart from
    peft's float32 model is what rounding a layer's inputs costs without adapters too."""
    architecture, overrides = FORMATS[form]
    sizes = {"mlp_only_layers": []} if architecture == "qwen3_moe" else {}
    checkpoint = make_checkpoint(
        architecture, tmp_path / "base", initializer_range=0.06, **{**sizes, **overrides}
    )
    make_tokenizer(checkpoint)
    served, settings = served_in(form, checkpoint, tmp_path)
    twin = write_decoded(checkpoint, served, settings, tmp_path / "decoded")
    theirs = make_adapter(twin, tmp_path / "lora", None)
    model = load_model(served, kernels=NativeKernels(), **settings)
    adapters = ModelAdapters(model, num_adapters=2, max_rank=8)
    adapter = adapters.read(tmp_path / "lora")
    adapters.put(1, adapter)
    assert projections_compared(model, adapters, adapter) >= 12
    with torch.inference_mode():
        adapted = theirs(torch.tensor([PROMPT])).logits[0]
        with theirs.disable_adapter():
            base = theirs(torch.tensor([PROMPT])).logits[0]

    def error(place: int, expected: torch.Tensor) -> torch.Tensor:
        """Of half of the rows: rounding gives some tokens other experts."""
        difference = logits(model, adapters, place) - expected
        return difference.square().mean(-1).sqrt().median()

    without, effect = error(2, base), (adapted - base).square().mean(-1).sqrt().median()
    assert error(1, adapted) < 1.5 * without + 1e-5
    assert effect > 3 * without


def projections_compared(model: CausalLM, adapters: ModelAdapters, adapter: Adapter) -> int:
    """The number of projections to whose outputs the adapter in place 1 adds its products."""
    count = 0
    for path, layer in model.named_modules():
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            continue
        hidden = torch.randn(5, layer.columns)
        alone = layer.forward(hidden)
        with adapters.rows.use(torch.tensor([1, 2, 1, 1, 2])):
            found = layer.forward(hidden) - alone
        pairs = [adapter.projections[placement.name] for placement in layer.placements(path)]
        expected = torch.cat([hidden @ pair.down.T @ pair.up.T for pair in pairs], dim=1)
        assert not found[[1, 4]].any()
        torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]], atol=2e-5, rtol=1e-4)
        count += len(pairs)
    return count


SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=10, logprobs=3, ignore_eos=True)
MODELS = [
    ("qwen3_moe", {"dtype": "bfloat16", "quantization": "int4"}),
    ("deepseek_v3", {"dtype": "float32", "quantization": "int8", "page_size": 4}),
    ("qwen3_next", {"dtype": "bfloat16", "chunked_prefill_size": 7}),
    ("gpt_oss", {"dtype": "float16", "kv_cache_dtype": "int8"}),
]


@pytest.mark.parametrize(("family", "settings"), MODELS, ids=[family for family, _ in MODELS])
def test_adapters_of_everything_answer_in_a_batch_as_alone(
    family: str,
    settings: dict[str, Any],
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Experts, routers, latents and recurrent layers. A load holds no step."""
    folders = [tmp_path_factory.mktemp(f"{family}{number}") for number in range(3)]
    for seed, folder in enumerate(folders):
        make_adapter(checkpoint(family), folder, None, seed=seed, size=0.4)
    lora = " ".join(f"{number}={folder}" for number, folder in enumerate(folders[:2]))
    engine = InProcessEngine(checkpoint(family), lora=lora, **settings)
    with Operations() as operations:
        assert isinstance(engine.load_adapter("2", folders[2]), AdapterInfo)
    assert not operations.names
    names = ["", "0", "1", "2", "1", ""]
    prompts = [PROMPT[:n] for n in (40, 33, 21, 37, 5, 12)]

    def answers(order: list[int], salt: str) -> list[tuple[list[int], bytes]]:
        tokens = engine.generate(
            [prompts[i] for i in order], SAMPLED, salt, adapters=[names[i] for i in order]
        )
        rows = [b"".join(np.array(r.logprobs).tobytes() for r in one) for one in engine.logprobs]
        return list(zip(tokens, rows, strict=True))

    every = list(range(6))
    alone = [answers([i], "alone")[0] for i in every]
    assert answers(every, "together") == alone
    assert [*reversed(answers(every[::-1], "reversed"))] == alone
    assert answers(every, "together") == alone and any(engine.cached)
    one = {str(engine.generate([PROMPT], SAMPLED, adapters=name)) for name in names[:4]}
    assert len(one) == 4, "two adapters answer alike"
