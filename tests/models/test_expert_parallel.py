"""Ranks that hold whole experts compute what one rank computes, with a part of the memory each."""

import functools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import radixrt_kernels
from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.mlp import Experts
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import weight_bytes, weight_slots
from radixrt.models import loader
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.loader import load_model
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.models.gguf_files import write_gguf
from tests.models.quantized_checkpoints import Layout, quantize_checkpoint
from tests.models.ranks import Ranks, run_ranks
from tests.models.test_gpt_oss import SIZES, in_mxfp4
from tests.models.tp_rank import Job, Result, compute

torch.set_num_threads(1)

IS_COMPLETE = "RADIXRT_EVERY_MIXTURE" in os.environ
ALIKE = ("granite_hybrid", "qwen3_next", "qwen3_moe_unnormed", "glm4_moe", "deepseek_v2")
"""Their experts are those of another, but for factors and sizes; ``make test-mixtures`` has them."""
FAMILIES = [
    "lfm2_moe",
    "qwen3_5_moe",
    "granite_hybrid",
    "nemotron_h",
    "qwen3_next",
    "mixtral",
    "minimax_m2",
    "qwen3_moe",
    "qwen3_moe_unnormed",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "gemma4_moe",
]
"""The mixtures that ranks share."""
FAMILIES = [name for name in FAMILIES if IS_COMPLETE or name not in ALIKE]
OF_EIGHT = ("glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "nemotron_h")
COUNTS = {"mixtral": 4, **dict.fromkeys(OF_EIGHT, 8)}
"""Experts of families that have not six."""

IS_NATIVE = radixrt_kernels.available()
JOBS = [*FAMILIES, "dummy", *(["native", "native_with_biases"] if IS_NATIVE else [])]
OF_FOUR = JOBS if IS_COMPLETE else [name for name in JOBS if name in ("qwen3_moe", "native")]
SPLIT = JOBS if IS_COMPLETE else ["gpt_oss"]

needs_native = pytest.mark.skipif(
    not IS_NATIVE, reason=f"no native kernels: {radixrt_kernels.missing_because}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("models")
    jobs = {name: Job(str(make_checkpoint(name, folder / name))) for name in FAMILIES}
    jobs["dummy"] = Job(jobs["qwen3_moe"].model, load_format="dummy")
    if IS_NATIVE:
        jobs["native"] = Job(jobs["qwen3_moe"].model, native=True)
        jobs["native_with_biases"] = Job(jobs["gpt_oss"].model, native=True)
    return jobs


@pytest.fixture(scope="module")
def two(models: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    jobs = {f"{name}-2": replace(job, expert_groups=2) for name, job in models.items()}
    return run_ranks(2, jobs, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(models: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    jobs = {f"{name}-4": replace(models[name], expert_groups=4) for name in OF_FOUR}
    jobs |= {f"{name}-2": replace(models[name], expert_groups=2) for name in SPLIT}
    return run_ranks(4, jobs, tmp_path_factory.mktemp("four"))


@functools.cache
def alone(job: Job) -> Result:
    return compute(job, TensorParallel())


def check(ranks: Ranks, models: dict[str, Job], name: str, groups: int) -> None:
    """The tokens of one rank, and no more memory for experts than a rank's part of them."""
    expected, results = alone(models[name]), ranks.results(f"{name}-{groups}")
    count = COUNTS.get(name, 6)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=0)
        assert result.tokens == expected.tokens
        place = TensorParallel(rank, ranks.size, expert_groups=groups)
        part = len(place.own_experts(count)) / count / place.ranks_per_expert
        assert result.expert_bytes == pytest.approx(part * expected.expert_bytes, rel=0.02)


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_with_half_of_the_experts_each_give_the_tokens_of_one(
    two: Ranks, models: dict[str, Job], name: str
) -> None:
    check(two, models, name, 2)


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_give_the_tokens_of_one(four: Ranks, models: dict[str, Job], name: str) -> None:
    check(four, models, name, 4)


@pytest.mark.parametrize("name", SPLIT)
def test_pairs_of_ranks_can_split_the_experts_that_they_hold(
    four: Ranks, models: dict[str, Job], name: str
) -> None:
    check(four, models, name, 2)


# ------------------------------------------------------------ forms of weights, without processes


class Unsummed(TensorParallel):
    """A rank that keeps its part of each sum."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor


def _mixed_kinds(name: str) -> gguf.GGMLQuantizationType:
    """Kinds that differ between an expert's gate and up."""
    kinds = gguf.GGMLQuantizationType
    if "gate_proj" in name or "gate_up" in name:
        return kinds.Q4_0
    return kinds.Q5_1 if "up_proj" in name else kinds.Q8_0


def _gguf(folder: Path, kind: Any) -> Path:
    sizes = {"mlp_only_layers": [], "moe_intermediate_size": 64}
    plain = make_checkpoint("qwen3_moe", folder / "plain", **sizes)
    make_tokenizer(plain)
    return resolve_model_path(str(write_gguf(plain, folder / "tiny.gguf", kind=kind)))


def _quantized(method: str, folder: Path) -> Path:
    plain = make_checkpoint("qwen3_moe", folder / "plain", mlp_only_layers=[])
    return quantize_checkpoint(plain, folder, Layout(method, group_size=16))[0]


def _mxfp4(folder: Path) -> Path:
    return in_mxfp4(make_checkpoint("gpt_oss", folder / "plain", **SIZES), folder)[0]


def _plain(architecture: str, folder: Path) -> Path:
    return make_checkpoint(architecture, folder / "plain")


FORMS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "float32": (partial(_plain, "mixtral"), "auto"),
    "biases": (partial(_plain, "gpt_oss"), "auto"),
    "int8": (partial(_plain, "qwen3_moe"), "int8"),
    "int4": (partial(_plain, "qwen3_moe"), "int4"),
    "awq": (partial(_quantized, "awq"), "auto"),
    "gptq": (partial(_quantized, "gptq"), "auto"),
    "mxfp4": (_mxfp4, "auto"),
    "GGUF, one kind": (partial(_gguf, kind=gguf.GGMLQuantizationType.Q4_0), "auto"),
    "GGUF, mixed kinds": (partial(_gguf, kind=_mixed_kinds), "auto"),
    "GGUF, rounded": (partial(_gguf, kind=gguf.GGMLQuantizationType.Q4_0), "int8"),
}
"""How to make a checkpoint, and ``--quantization``."""


def experts_of(folder: Path, tp: TensorParallel, kernels: LayerKernels, form: str) -> list[Experts]:
    model = load_model(folder, tp=tp, kernels=kernels, quantization=FORMS[form][1])
    return [module for module in model.modules() if isinstance(module, Experts)]


@needs_native
@pytest.mark.parametrize("form", FORMS)
def test_the_parts_of_the_ranks_add_up_in_every_form_of_weights(form: str, tmp_path: Path) -> None:
    folder, kernels = FORMS[form][0](tmp_path), NativeKernels()
    whole = experts_of(folder, TensorParallel(), kernels, form)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 64, generator=generator)
    count = whole[0].num_experts
    scores = torch.rand(20, count, generator=generator)
    scores[0, :2], scores[1, -2:] = 2, 2  # tokens whose experts are all on one rank
    weights, chosen = scores.topk(2)
    for groups in (2, 4):
        ranks = [
            experts_of(folder, Unsummed(rank, groups, expert_groups=groups), kernels, form)
            for rank in range(groups)
        ]
        for layer, expected in enumerate(whole):
            parts = [rank[layer].forward(hidden, (weights, chosen)) for rank in ranks]
            total = torch.stack(parts).sum(0)
            torch.testing.assert_close(total, expected.forward(hidden, (weights, chosen)))
            one = [rank[layer].forward(hidden[:1], (weights[:1], chosen[:1])) for rank in ranks]
            for alone, batched in zip(one, parts, strict=True):
                assert torch.equal(alone[0], batched[0])  # a token's sum is of its own terms alone
            sizes = [weight_bytes(rank[layer]) * count / len(rank[layer].own) for rank in ranks]
            assert sizes == pytest.approx([weight_bytes(expected)] * groups, rel=0.02)


@pytest.mark.parametrize("form", ["float32", "biases"])
def test_the_reference_computes_a_part_of_the_experts_too(form: str, tmp_path: Path) -> None:
    folder = FORMS[form][0](tmp_path)
    (whole, *_), hidden = (
        experts_of(folder, TensorParallel(), LayerKernels(), form),
        torch.rand(9, 64),
    )
    choice = torch.rand(9, whole.num_experts).topk(2)
    parts = [
        experts_of(folder, Unsummed(rank, 2, expert_groups=2), LayerKernels(), form)[0]
        for rank in range(2)
    ]
    total = sum(part.forward(hidden, tuple(choice)) for part in parts)
    torch.testing.assert_close(total, whole.forward(hidden, tuple(choice)))


# ------------------------------------------------------------ reading


def mapped_bytes(file: Path) -> int:
    """Bytes of a file that this process has read through its mappings."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            is_ours = line.endswith(str(file.resolve()))
        elif is_ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@needs_native
@pytest.mark.parametrize("form", ["safetensors", "GGUF"])
def test_a_rank_reads_the_bytes_of_its_own_experts_alone(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"mlp_only_layers": [], "moe_intermediate_size": 8192, "num_hidden_layers": 1}
    folder = make_checkpoint("qwen3_moe", tmp_path / "plain", **sizes)
    file = folder / "model.safetensors"
    if form == "GGUF":
        make_tokenizer(folder)
        file = write_gguf(folder, tmp_path / "a.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
        folder = resolve_model_path(str(file))
    held = []

    def holding(read: Callable[..., Iterator[tuple[str, Tensor]]]) -> Callable[..., Any]:
        def reads(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in read(*arguments):
                held.append(tensor)  # keeps the mapping
                yield name, tensor

        return reads

    for name in ("read_tensors", "read_weights"):
        monkeypatch.setattr(loader, name, holding(getattr(loader, name)))
    size = file.stat().st_size
    load_model(folder, tp=TensorParallel(1, 2, expert_groups=2), kernels=NativeKernels())
    assert (
        0.45 * size < mapped_bytes(file) < 0.8 * size
    )  # pages beside those that are read are mapped too
    held.clear()
    load_model(folder, kernels=NativeKernels())
    assert mapped_bytes(file) > 0.9 * size


def test_a_rank_knows_the_weights_of_the_whole_model(tmp_path: Path) -> None:
    folder = make_checkpoint("glm4_moe", tmp_path / "plain")
    whole = load_model(folder)
    part = load_model(folder, tp=TensorParallel(1, 2, expert_groups=2))
    assert part.num_parameters == whole.num_parameters
    assert weight_slots(part).keys() == weight_slots(whole).keys()


# ------------------------------------------------------------ settings


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (2, 4), (4, 3)])
def test_groups_that_do_not_divide_the_ranks_are_refused(tp: int, ep: int) -> None:
    with pytest.raises(ConfigError, match=rf"--ep {ep} must divide --tp {tp}"):
        ServerConfig(tp=tp, ep=ep).validate()


def test_zero_spreads_experts_over_all_ranks() -> None:
    assert ServerConfig(tp=4, ep=0).validate().expert_groups == 4
    assert ServerConfig(tp=4).validate().expert_groups == 1


def test_a_model_without_experts_is_refused(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"--ep .*no experts; leave --ep out"):
        load_model(checkpoint("qwen3"), tp=TensorParallel(0, 2, expert_groups=2))


def test_more_groups_than_experts_are_refused(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8}
    folder = make_checkpoint("mixtral", tmp_path / "wide", **sizes)
    with pytest.raises(ConfigError, match=r"4 experts.*--ep 8 .*at most 4"):
        load_model(folder, tp=TensorParallel(0, 8, expert_groups=8))


def test_experts_that_a_group_cannot_split_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "odd", moe_intermediate_size=45)
    with pytest.raises(ConfigError, match=r"expert size \(45\).* 2 ranks .*choose --ep 4"):
        load_model(folder, tp=TensorParallel(0, 4, expert_groups=2))
