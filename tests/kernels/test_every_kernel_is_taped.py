"""A kernel that a tape did not hear of would be missing from every replay: layers and attention
leave none out."""

from collections.abc import Callable

import pytest
import torch

import radixrt_kernels
from radixrt.layers.kernels.native import NativeKernels
from radixrt.layers.lora import LoraStack, LowRank, StepRows
from radixrt_kernels import lora, tape
from tests.checkpoints.expert_stacks import dense_stack

WEIGHT, COS_SIN = torch.randn(8), torch.randn(10, 8)
EXPERTS = tuple(dense_stack(torch.randn(4, rows, columns)) for rows, columns in ((12, 16), (16, 6)))
ADAPTER_ROWS, ADAPTERS = StepRows(2, lora), list[LoraStack]()


@pytest.fixture(autouse=True, scope="module")
def packed() -> None:
    if radixrt_kernels.available():
        ADAPTERS.append(LoraStack([8], 8, 16, ADAPTER_ROWS, 2, torch.float32))
        for place in range(2):
            ADAPTERS[0].put(place, [[LowRank(torch.randn(4, 8), torch.randn(8, 4))]])
        for stack in EXPERTS:
            stack.matrix = NativeKernels().pack_stack(stack.matrix, stack.count)


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


def gated(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    rows, gate = states.view(-1, 2, 3, 4).unbind(1)
    normed = NativeKernels().recurrence.gated_norm(rows, gate, torch.ones(1, 4), 1e-6, True)
    return NativeKernels().sigmoid_gate(gate, normed).flatten(1)


def mixed(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each token goes to two of four experts, and not all to the same ones."""
    kernels = NativeKernels()
    choice = kernels.choose_experts(states[:, :4].contiguous(), 2, normalize=True)
    hidden = states[:, 8:].contiguous()
    return kernels.experts(hidden, choice, EXPERTS, "silu")


def adapted(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Each token has one of two adapters, or none."""
    ADAPTER_ROWS.sort(positions % 3)
    hidden, output = (states[:, i : i + 8].contiguous() for i in (0, 8))
    return ADAPTERS[0].add(hidden, output)


@pytest.mark.parametrize("compute", [rotated, normed, added, activated, gated, mixed, adapted])
def test_a_replay_computes_what_a_call_does(
    isa: str, compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    with torch.inference_mode():
        tapes = tape.Tapes(compute, torch.randn(1, 24), torch.arange(1))
    states, positions = torch.randn(5, 24), torch.arange(5).flip(0)
    replayed = tapes.of(5).replay(states, positions).clone()
    torch.testing.assert_close(replayed, compute(states, positions), rtol=0, atol=0)
