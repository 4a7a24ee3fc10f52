"""Triton adds adapters as the reference does, and each row has the bits that it has alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from radixrt.base.sampling_params import SamplingParams
from radixrt.layers.kernels.gpu import GpuKernels
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.adapters import ModelAdapters
from radixrt.models.loader import load_model
from radixrt.worker import build
from radixrt_kernels.reference import lora as reference
from radixrt_kernels.triton import lora
from tests.adapters.peft_adapters import config_of, make_adapter
from tests.adapters.test_against_peft import PROMPT, logits, without_adapters
from tests.engine.in_process import InProcessEngine
from tests.triton.numbers import DEVICE, draw

ADAPTERS, RANK = 4, 32
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


class Layer:
    """Random adapters of a layer, of which some have nothing for a part."""

    def __init__(self, widths: tuple[int, ...], columns: int, dtype: torch.dtype) -> None:
        self.widths = torch.tensor(widths, dtype=torch.int32, device=DEVICE)
        self.down = draw(ADAPTERS, len(widths), RANK, columns, dtype=dtype) / columns**0.5
        self.ups = [draw(ADAPTERS, width, RANK, dtype=dtype) for width in widths]
        self.ranks = torch.full((ADAPTERS, len(widths)), RANK, dtype=torch.int32, device=DEVICE)
        for adapter, part in ((1, len(widths) - 1), (3, 0)):
            self.ranks[adapter, part] = 0
            self.down[adapter, part] = self.ups[part][adapter] = 0

    def add(
        self,
        hidden: torch.Tensor,
        adapters: torch.Tensor,
        output: torch.Tensor,
        factors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output, stack = output.clone(), self.down.flatten(1, 2)
        up = torch.stack([lora.pack_up([u[i] for u in self.ups]) for i in range(ADAPTERS)])
        groups = lora.group_rows(adapters, ADAPTERS)
        weights = stack, up, RANK, self.ranks, self.widths
        lora.add_lora_(hidden, groups, *weights, output, factors=factors)
        return output

    def expected(
        self, hidden: torch.Tensor, adapters: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        return reference.add_lora_of_parts(hidden, adapters, self.down, self.ups, output)


@pytest.mark.parametrize(("count", "columns"), [(1, 64), (21, 200), (40, 128)])
@pytest.mark.parametrize("widths", [(16,), (20, 7, 90)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_of_many_adapters(
    dtype: torch.dtype, widths: tuple[int, ...], count: int, columns: int
) -> None:
    layer = Layer(widths, columns, dtype)
    hidden, output = draw(count, columns, dtype=dtype), draw(count, sum(widths), dtype=dtype)
    adapters = torch.arange(count, device=DEVICE) * 7 % (ADAPTERS + 1)
    added, expected = layer.add(hidden, adapters, output), layer.expected(hidden, adapters, output)
    tolerance = TOLERANCES[dtype] * float(expected.abs().max())
    torch.testing.assert_close(added, expected, atol=tolerance, rtol=TOLERANCES[dtype])
    for row in range(0, count, 9):
        one = slice(row, row + 1)
        alone = layer.add(hidden[one], adapters[one], output[one])
        assert torch.equal(alone[0], added[row]), "the bits depend on the batch"


def test_what_an_adapter_does_not_change_keeps_its_bits() -> None:
    """Also zeros with a sign, and the rest of a wider tensor."""
    layer = Layer((16, 16), 32, torch.float32)
    wide = torch.full((3, 40), -0.0, device=DEVICE)
    hidden = draw(3, 32, dtype=torch.float32)
    up = torch.stack([lora.pack_up([u[i] for u in layer.ups]) for i in range(ADAPTERS)])
    groups = lora.group_rows(torch.tensor([ADAPTERS, 1, 3], device=DEVICE), ADAPTERS)
    stack = layer.down.flatten(1, 2)
    lora.add_lora_(hidden, groups, stack, up, RANK, layer.ranks, layer.widths, wide[:, :32])
    untouched = torch.cat((wide[0], wide[1, 16:], wide[2, :16], wide[2, 32:]))
    assert untouched.signbit().all() and (untouched == 0).all()
    assert (wide[1, :16] != 0).all() and (wide[2, 16:32] != 0).all()


def test_pairs_of_a_token_have_its_input_and_factors_of_their_own() -> None:
    layer = Layer((24,), 48, torch.float32)
    hidden, output = draw(5, 48, dtype=torch.float32), draw(10, 24, dtype=torch.float32)
    adapters, factors = torch.arange(10, device=DEVICE) % 5, torch.rand(10).to(DEVICE)
    found = layer.add(hidden, adapters, output, factors) - output
    alone = layer.add(hidden.repeat_interleave(2, 0), adapters, torch.zeros_like(output))
    torch.testing.assert_close(found, alone * factors[:, None], atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    layer = Layer((16,), 32, torch.float32)
    hidden, output = draw(2, 32, dtype=torch.float32), draw(2, 16, dtype=torch.float32)
    adapters = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for wrong in ((hidden[:, 1:], output), (hidden, output[:, 1:]), (hidden.half(), output)):
        with pytest.raises(ValueError):
            layer.add(wrong[0], adapters, wrong[1])
    assert layer.add(hidden[:0], adapters[:0], output[:0]).shape == (0, 16)


@pytest.mark.skipif(DEVICE == "cuda", reason="the models of this test are on the CPU")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_logits_of_models(family: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Merged projections, experts, routers and latents, as by the kernels of the CPU."""
    make_adapter(checkpoint(family), tmp_path, None)
    found = []
    for kernels in (NativeKernels(), GpuKernels(None)):
        model = load_model(checkpoint(family), kernels=kernels)
        assert kernels.lora is not None
        adapters = ModelAdapters(model, num_adapters=2, max_rank=8, kernels=kernels.lora)
        adapters.put(1, adapters.read(tmp_path))
        found.append((logits(model, adapters, 1), logits(model, adapters, 2)))
        without_adapters(model)
    (adapted, base), (ours, own_base) = found
    torch.testing.assert_close(ours, adapted, atol=2e-4, rtol=0)
    torch.testing.assert_close(own_base, base, atol=2e-4, rtol=0)
    assert (adapted - base).abs().max() > 0.01


@pytest.mark.skipif(DEVICE == "cuda", reason="the models of this test are on the CPU")
def test_a_worker_gives_the_tokens_of_adapters(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("all_linear", "qwen3")
    make_adapter(checkpoint("qwen3"), tmp_path, config, size=0.5)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def answers() -> list[list[int]]:
        engine = InProcessEngine(checkpoint("qwen3"), lora=f"one={tmp_path}", dtype="float32")
        return engine.generate([PROMPT[:9]] * 2, sampling, adapters=["", "one"])

    expected = answers()
    monkeypatch.setattr(build, "layer_kernels", lambda device: GpuKernels(None))
    assert answers() == expected and expected[0] != expected[1]
