"""Recurrent blocks of decoder layers, which keep one state of a sequence where attention keeps its
keys and values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.attention.kv_spec import CachedTensor
from radixrt.attention.states import StateSpec, StateTables
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot, parameter
from radixrt_kernels import tape


class RecurrentBlock(KernelLayer, ABC):
    """A block of layer ``layer_index``, whose states are the context's at that index. It advances
    the state of each sequence by the step's tokens."""

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index

    @abstractmethod
    def state_spec(self) -> StateSpec:
        """The state of one sequence in this layer."""

    @abstractmethod
    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], positions [num_tokens] -> [num_tokens, hidden_size]"""

    def advance(
        self, kernel: Callable[..., None], tensor: int, context: ForwardContext, *arguments: Any
    ) -> None:
        """Call a kernel with ``arguments``, a tensor of the layer's states by its index, and the
        step."""
        assert context.states is not None, "a model with recurrent layers needs their states"
        tape.call(self._advance_by_step, kernel, tensor, context.states, *arguments)

    def _advance_by_step(
        self, kernel: Callable[..., None], tensor: int, states: StateTables, *arguments: Any
    ) -> None:
        """Use the step of now: a tape repeats this call, and the step has changed by then."""
        step = states.step
        kernel(
            *arguments,
            states.layers[self.layer_index][tensor],
            (step.indptr, step.rows, step.keep_indptr, step.keep_ends, step.keep_rows),
        )


class CausalConvolution(nn.Module):
    """The weights of a convolution of each channel over its last inputs; a checkpoint has them as
    [channels, 1, taps]."""

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.channels, self.taps = channels, taps
        self.weight = parameter(taps, channels)
        self.bias = nn.Parameter(torch.zeros(channels), requires_grad=False) if bias else None

    def state(self) -> CachedTensor:
        """The last inputs, in the model's dtype."""
        return CachedTensor((self.taps - 1, self.channels), self.weight.dtype)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        shape = (self.channels, 1, self.taps)
        yield f"{path}.weight", WeightSlot(shape, self.weight, convert=lambda t: t.squeeze(1).T)
        if self.bias is not None:
            yield f"{path}.bias", WeightSlot((self.channels,), self.bias)


class ShortConvolution(RecurrentBlock):
    """A convolution over a few tokens between two gates, which are projections as its input is
    (LFM2)."""

    def __init__(
        self, layer_index: int, hidden_size: int, taps: int, bias: bool, tp: TensorParallel
    ) -> None:
        super().__init__(layer_index)
        projection = [Projection.whole("in_proj", 3 * hidden_size)]
        self.in_proj = ColumnParallelLinear(hidden_size, projection, bias)
        self.conv = CausalConvolution(hidden_size, taps, bias)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias, tp)

    def state_spec(self) -> StateSpec:
        return StateSpec((self.conv.state(),))

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """See ``RecurrentBlock.forward``."""
        before, after, inputs = self.in_proj.forward(hidden).chunk(3, dim=-1)
        outputs = torch.empty(inputs.shape, dtype=inputs.dtype)
        conv = self.conv
        weights = (conv.weight, conv.bias, False)
        kernel = self.kernels.recurrence.short_convolution
        self.advance(kernel, 0, context, inputs, before, after, *weights, outputs)
        return self.out_proj.forward(outputs)
