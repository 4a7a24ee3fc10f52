"""Hidden states of the wanted rows alone are those of a step for all rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import radixrt_kernels
from radixrt.attention.backend import AttentionSetup
from radixrt.attention.cpu import CpuBackend
from radixrt.layers.kernels.native import NativeKernels
from radixrt.models.loader import load_model
from tests.checkpoints import CONFIGS
from tests.models.harness import Harness, Sequence, with_forward


class NoEmptyBatch(NativeKernels):
    """A GPU refuses empty grids: a step in which no prompt ends may call nothing for its zero
    rows."""


def _refusing(name: str) -> Callable[..., Any]:
    operation = getattr(NativeKernels, name)

    def call(*arguments: Any, **options: Any) -> Any:
        sizes = [part.shape for part in arguments if isinstance(part, torch.Tensor)]
        assert all(size[0] for size in sizes), f"{name} of nothing"
        return operation(*arguments, **options)

    return call


for name in (
    "rms_norm",
    "add_rms_norm",
    "rotate",
    "gated_activation",
    "soft_cap",
    "choose_experts",
    "experts",
):
    setattr(NoEmptyBatch, name, _refusing(name))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_wanted_rows_are_those_of_all_rows(
    checkpoint: Callable[[str], Path], architecture: str
) -> None:
    """A step is computed for all rows, for some, and for none."""
    model = load_model(checkpoint(architecture), kernels=NoEmptyBatch())

    def forward(*step: Any) -> torch.Tensor:
        *inputs, rows = step
        assert rows is None, "the harness wants all"
        states = inputs[-1].states
        with states.unchanged():
            every = model.forward(*inputs)
        for rows in (torch.tensor([1, 4, len(every) - 1]), torch.tensor([], dtype=torch.int64)):
            with states.unchanged():
                wanted = model.forward(*inputs, rows)
            assert torch.equal(wanted, every[rows])
            if model.generates:
                assert model.logits(wanted).shape == (len(rows), model.vocab_size)
        return every

    setup = AttentionSetup(specs=model.attention_specs(), dtype=model.dtype, kv_dtype=model.dtype)
    harness = Harness(with_forward(model, forward), page_size=4, backend=CpuBackend(setup))
    harness.step([(Sequence(), [5, 17, 200]), (Sequence(), [150, 8, 31, 12, 90])])


@pytest.mark.skipif(not radixrt_kernels.available(), reason="the reference's bits follow the batch")
def test_layers_that_share_kv_compute_no_other_rows(
    checkpoint: Callable[[str], Path],
) -> None:
    """Of Gemma 4: a decode, a chunk without any, a prompt's last token, a draft's last three."""
    prompts = [list(range(3, 3 + count)) for count in (17, 40, 75, 33)]
    model = load_model(checkpoint("gemma4_e"), kernels=NativeKernels())
    sequences, results = [[Sequence() for _ in prompts] for _ in range(2)], []
    layer, seen = model.model.layers[-2], []  # the first that shares
    feed_forward = layer.feed_forward
    layer.feed_forward = lambda *inputs: seen.append(len(inputs[0])) or feed_forward(*inputs)
    for rows, own in zip((None, torch.tensor([0, 52, 59, 60, 61])), sequences, strict=True):
        harness = Harness(model, page_size=4)
        first, second, third, fourth = own
        a, b, c, d = prompts
        harness.step([(first, a[:-1]), (second, b[:8]), (third, c[:5])])
        work = [(first, a[-1:]), (fourth, d[:20]), (second, b[8:]), (third, c[5:14])]
        results.append(harness.hidden(work, rows))
    chosen = results[0][[0, 52, 59, 60, 61]]
    assert torch.equal(chosen, results[1])
    assert seen[-1] == 5 < seen[-3] == 62
    assert len(harness.hidden([(fourth, d[20:])], torch.tensor([], dtype=torch.int64))) == 0
    first_of_each = torch.tensor([0, 1])
    assert harness.context.narrowed(first_of_each) is None
