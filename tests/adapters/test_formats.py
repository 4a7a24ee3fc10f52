"""Adapters in GGUF files, and adapters of models whose weights are in other formats."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import radixrt_kernels
from radixrt.base.sampling_params import SamplingParams
from radixrt.cli.doctor.models import adapter_findings
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.linear import ColumnParallelLinear, RowParallelLinear
from radixrt.models.adapter_files.form import AdapterError
from radixrt.models.adapters import ModelAdapters, read_adapter
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.loader import load_model
from tests.adapters.peft_adapters import make_adapter
from tests.adapters.test_against_peft import PROMPT, logits
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.engine.in_process import InProcessEngine

gguf = pytest.importorskip("gguf")

from tests.adapters.gguf_adapters import write_adapter  # noqa: E402
from tests.models.gguf_files import write_gguf  # noqa: E402

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


@pytest.mark.parametrize(
    ("family", "reason"), [("qwen3_5", "another order in GGUF"), ("falcon_h1", "Falcon-H1")]
)
def test_weights_that_the_converter_changes_are_refused(
    family: str, reason: str, tmp_path: Path
) -> None:
    """An adapter of the checkpoint would be added to other rows."""
    checkpoint = make_checkpoint(family, tmp_path / "base")
    make_tokenizer(checkpoint)
    make_adapter(checkpoint, tmp_path / "lora", None)
    served = resolve_model_path(str(write_gguf(checkpoint, tmp_path / "model.gguf")))
    with pytest.raises(AdapterError, match=reason):
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
    assert none.level == "error" and "adapter_config.json" in none.fact
    (mixture,) = adapter_findings(str(other), [f"own={own}"])
    assert mixture.level == "ok", mixture.fact
    (finding,) = adapter_findings(str(checkpoint), ["=x"])
    assert finding.level == "error" and "NAME=PATH" in finding.fact


# ------------------------------------------------------------ weight formats


def served_in(form: str, checkpoint: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """A checkpoint in a format of weights: the folder, and the settings."""
    if form in ("int8", "int4", "fp8"):
        return checkpoint, {"quantization": form}
    kind = gguf.GGMLQuantizationType[form]
    file = write_gguf(checkpoint, folder / "model.gguf", kind=lambda name: kind)
    return resolve_model_path(str(file)), {}


@pytest.mark.parametrize("form", ["int8", "int4", "Q8_0", "Q4_0"])
def test_an_adapter_is_added_to_weights_of_every_format(form: str, tmp_path: Path) -> None:
    """What it adds to a layer's output is the product of its matrices, in float32."""
    checkpoint, folder, _ = make_pair("llama", tmp_path)
    base, settings = served_in(form, checkpoint, tmp_path)
    model = load_model(base, kernels=NativeKernels(), dtype="float32", **settings)
    adapters = ModelAdapters(model, num_adapters=2, max_rank=8)
    adapter = adapters.read(folder)
    adapters.put(1, adapter)
    count = 0
    for path, layer in model.named_modules():
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            continue
        hidden = torch.randn(5, layer.columns)
        plain = layer.forward(hidden)
        adapters.rows.sort(torch.tensor([1, 2, 1, 1, 2]))
        found = layer.forward(hidden) - plain
        adapters.rows.clear()
        pairs = [adapter.projections[placement.name] for placement in layer.placements(path)]
        expected = torch.cat([hidden @ pair.down.T @ pair.up.T for pair in pairs], dim=1)
        assert not found[[1, 4]].any()
        torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]], atol=2e-5, rtol=1e-4)
        count += len(pairs)
    assert count == 7 * 3


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
    """Experts, routers, latents and recurrent layers."""
    folders = [tmp_path_factory.mktemp(f"{family}{number}") for number in range(3)]
    for seed, folder in enumerate(folders):
        make_adapter(checkpoint(family), folder, None, seed=seed, size=0.4)
    lora = " ".join(f"{number}={folder}" for number, folder in enumerate(folders))
    engine = InProcessEngine(checkpoint(family), lora=lora, **settings)
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
