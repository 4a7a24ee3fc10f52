"""A kernel that a tape did not hear of would be missing from every replay: layers and attention leave none out."""

from collections.abc import Callable

import pytest
import torch

from radixrt.layers.native_kernels import NativeKernels
from radixrt_kernels import tape

WEIGHT, COS_SIN = torch.randn(8), torch.randn(10, 8)


def rotated(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    query, key = states.clone().unflatten(1, (-1, 8)).split([2, 1], dim=1)
    query, key = NativeKernels().rotate(positions, query, key, COS_SIN)
    return torch.cat((query, key), dim=1)


def normed(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    heads = states.unflatten(1, (-1, 8))
    return NativeKernels().rms_norm(heads, WEIGHT, 1e-6, False)


def added(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    hidden, residual = (states[:, i : i + 8].contiguous() for i in (0, 8))
    return torch.cat(NativeKernels().add_rms_norm(hidden, residual, WEIGHT, 1e-6, True))


def activated(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return NativeKernels().gated_activation("silu", states)


@pytest.mark.parametrize("compute", [rotated, normed, added, activated])
def test_a_replay_computes_what_a_call_does(
    isa: str, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    recorded, _ = tape.record(compute, torch.randn(5, 24), torch.arange(5))
    states, positions = torch.randn(5, 24), torch.arange(5).flip(0)
    replayed = recorded.replay(states, positions).clone()
    torch.testing.assert_close(replayed, compute(states, positions), rtol=0, atol=0)
