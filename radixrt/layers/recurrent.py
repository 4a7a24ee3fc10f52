"""Recurrent blocks of decoder layers, which keep one state of a sequence where attention keeps its
keys and values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

WHOLE = TensorParallel()
"""Each rank computes all of a recurrent block, and keeps whole states."""


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
        step, table = states.step, states.layers[self.layer_index][tensor]
        steps = (step.indptr, step.rows, step.keep_indptr, step.keep_ends, step.keep_rows)
        kernel(*arguments, table, steps)


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

    def __init__(self, layer_index: int, hidden_size: int, taps: int, bias: bool) -> None:
        super().__init__(layer_index)
        projection = [Projection.whole("in_proj", 3 * hidden_size)]
        self.in_proj = ColumnParallelLinear(hidden_size, projection, bias)
        self.conv = CausalConvolution(hidden_size, taps, bias)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias, WHOLE)

    def state_spec(self) -> StateSpec:
        return StateSpec((self.conv.state(),))

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        before, after, inputs = self.in_proj.forward(hidden).chunk(3, dim=-1)
        outputs = torch.empty(inputs.shape, dtype=inputs.dtype)
        conv = self.conv
        weights = (conv.weight, conv.bias, False)
        kernel = self.kernels.recurrence.short_convolution
        self.advance(kernel, 0, context, inputs, before, after, *weights, outputs)
        return self.out_proj.forward(outputs)


def head_parameter(path: str, values: Tensor, negative_exp: bool = False) -> tuple[str, WeightSlot]:
    """The slot of a float32 parameter of each head; ``negative_exp``: the checkpoint has ``log(-x)``
    of it."""
    convert = (lambda t: -t.float().exp()) if negative_exp else None
    return path, WeightSlot((len(values),), values, convert=convert)


def per_head(num_heads: int, value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((num_heads,), value, dtype=torch.float32), requires_grad=False)


DUMMY_RATE = -0.1
"""Of the decay in a model without a checkpoint, so that its states are used."""


class GatedDeltaNet(RecurrentBlock):
    """Linear attention by the gated delta rule (Yang et al., 2024), whose queries, keys and values
    pass a short convolution; its output is normed and gated (Qwen3-Next, Qwen3.5).

    Several heads of values share a key: neighbours, or in GGUF files of Qwen3.5 those at a distance
    of the number of keys (``linear_value_heads_tiled``).
    """

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__(layer_index)
        hidden_size = config.hidden_size
        self.num_key_heads, self.key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        self.num_heads, self.value_dim = config.linear_num_value_heads, config.linear_value_head_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_heads * self.value_dim
        self.sizes = [keys, keys, values]
        self.in_proj_qkvz = ColumnParallelLinear(
            hidden_size,
            [
                Projection.whole("in_proj_qkv", 2 * keys + values),
                Projection.whole("in_proj_z", values),
            ],
            bias=False,
        )
        self.in_proj_ba = ColumnParallelLinear(
            hidden_size,
            [Projection.whole(name, self.num_heads) for name in ("in_proj_b", "in_proj_a")],
            bias=False,
        )
        self.conv1d = CausalConvolution(sum(self.sizes), config.linear_conv_kernel_dim, bias=False)
        self.rate, self.dt_bias = (
            per_head(self.num_heads, DUMMY_RATE),
            per_head(self.num_heads, 1.0),
        )
        self.tiled = bool(getattr(config, "linear_value_heads_tiled", False))
        self.eps = config.rms_norm_eps
        self.norm = nn.Parameter(torch.ones(1, self.value_dim), requires_grad=False)
        self.out_proj = RowParallelLinear(values, hidden_size, False, WHOLE)

    def state_spec(self) -> StateSpec:
        shape = (self.num_heads, self.key_dim, self.value_dim)
        return StateSpec((self.conv1d.state(), CachedTensor(shape, torch.float32)))

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        kernels = self.kernels.recurrence
        inputs, gate = self.in_proj_qkvz.forward(hidden).split(self.in_proj_qkvz.sizes, dim=-1)
        gain, decay = self.in_proj_ba.forward(hidden).chunk(2, dim=-1)
        merged = torch.empty(inputs.shape, dtype=inputs.dtype)
        weights = (self.conv1d.weight, None, True)
        self.advance(kernels.short_convolution, 0, context, inputs, None, None, *weights, merged)
        query, key, value = merged.split(self.sizes, dim=-1)
        query, key = (x.unflatten(1, (self.num_key_heads, self.key_dim)) for x in (query, key))
        value = value.unflatten(1, (self.num_heads, self.value_dim))
        outputs = torch.empty(value.shape, dtype=value.dtype)
        gates = (decay, gain, self.rate, self.dt_bias, self.tiled)
        self.advance(kernels.gated_delta_rule, 1, context, query, key, value, *gates, outputs)
        gate = gate.unflatten(1, (self.num_heads, self.value_dim))
        normed = kernels.gated_norm(outputs, gate, self.norm, self.eps, False)
        return self.out_proj.forward(normed.flatten(1))

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name in ("in_proj_qkvz", "in_proj_ba", "conv1d", "out_proj"):
            yield from getattr(self, name).weight_slots(f"{path}.{name}")
        yield head_parameter(f"{path}.A_log", self.rate, negative_exp=True)
        yield head_parameter(f"{path}.dt_bias", self.dt_bias)
        yield f"{path}.norm.weight", WeightSlot((self.value_dim,), self.norm[0])


@dataclass(frozen=True, slots=True)
class Mamba2Options:
    """The sizes of a Mamba 2 block, which configs name differently."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    """Of the keys and queries (B and C)."""
    state_size: int
    """Features of a key."""
    taps: int
    """Tokens of the convolution."""
    eps: float
    conv_bias: bool = True
    bias: bool = False
    has_norm: bool = True
    gate_first: bool = True
    """The output is gated before it is normed."""
    dt_limit: tuple[float, float] = (0.0, math.inf)
    output_bias: bool = False
    factors: tuple[float, ...] = ()
    """Of the parts of the projection: gate, value, key, query, dt (Falcon-H1)."""


class Mamba2(RecurrentBlock):
    """A state space with one decay for each head (Dao & Gu, 2024)."""

    def __init__(self, options: Mamba2Options, layer_index: int) -> None:
        super().__init__(layer_index)
        self.options = o = options
        size, keys = o.num_heads * o.head_dim, o.num_groups * o.state_size
        self.sizes = [size, keys, keys]
        self.parts = [size, sum(self.sizes), o.num_heads]
        projection = [Projection.whole("in_proj", sum(self.parts))]
        self.in_proj = ColumnParallelLinear(o.hidden_size, projection, o.bias)
        self.conv1d = CausalConvolution(sum(self.sizes), o.taps, o.conv_bias)
        self.rate, self.dt_bias, self.skip = (
            per_head(o.num_heads, value) for value in (DUMMY_RATE, 0.0, 1.0)
        )
        groups = o.num_groups
        self.factors: Tensor | None = None
        if o.factors:
            counts = torch.tensor([size, *self.sizes, o.num_heads])
            factors = torch.tensor(o.factors, dtype=torch.get_default_dtype())
            self.factors = nn.Parameter(factors.repeat_interleave(counts), requires_grad=False)
        self.norm = None
        if o.has_norm:
            self.norm = nn.Parameter(torch.ones(groups, size // groups), requires_grad=False)
        self.out_proj = RowParallelLinear(size, o.hidden_size, o.output_bias, WHOLE)

    def state_spec(self) -> StateSpec:
        o = self.options
        shape = (o.num_heads, o.state_size, o.head_dim)
        return StateSpec((self.conv1d.state(), CachedTensor(shape, torch.float32)))

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        o, kernels = self.options, self.kernels.recurrence
        projected = self.in_proj.forward(hidden)
        if self.factors is not None:
            projected = projected * self.factors
        gate, inputs, dt = projected.split(self.parts, dim=-1)
        merged = torch.empty(inputs.shape, dtype=inputs.dtype)
        weights = (self.conv1d.weight, self.conv1d.bias, True)
        self.advance(kernels.short_convolution, 0, context, inputs, None, None, *weights, merged)
        value, key, query = merged.split(self.sizes, dim=-1)
        value = value.unflatten(1, (o.num_heads, o.head_dim))
        query, key = (x.unflatten(1, (o.num_groups, o.state_size)) for x in (query, key))
        outputs = torch.empty(value.shape, dtype=value.dtype)
        gates = (dt, self.rate, self.dt_bias, self.skip, o.dt_limit)
        self.advance(kernels.state_space_scan, 1, context, query, key, value, *gates, outputs)
        groups = 1 if self.norm is None else len(self.norm)
        outputs, gate = (x.flatten(1).unflatten(1, (groups, -1)) for x in (outputs, gate))
        gated = kernels.gated_norm(outputs, gate, self.norm, o.eps, o.gate_first)
        return self.out_proj.forward(gated.flatten(1))

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name in ("in_proj", "conv1d", "out_proj"):
            yield from getattr(self, name).weight_slots(f"{path}.{name}")
        yield head_parameter(f"{path}.A_log", self.rate, negative_exp=True)
        yield head_parameter(f"{path}.dt_bias", self.dt_bias)
        yield head_parameter(f"{path}.D", self.skip)
        if self.norm is not None:
            yield f"{path}.norm.weight", WeightSlot((self.norm.numel(),), self.norm.view(-1))
