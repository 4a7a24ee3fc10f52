"""Recurrent blocks of decoder layers, which keep one state of a sequence where attention keeps its
keys and values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
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
from radixrt_kernels import trace


def ranks_of(tp: TensorParallel, *counts: int) -> TensorParallel:
    """The ranks that split a block: ``tp`` if all ``counts`` of heads and groups divide evenly, else
    one, and each rank computes the whole block and keeps whole states."""
    return tp if all(count % tp.size == 0 for count in counts) else TensorParallel()


class RecurrentBlock(KernelLayer, ABC):
    """A block of layer ``layer_index``, whose states are the context's at that index. It advances
    the state of each sequence by the step's tokens.

    Where its heads are split over ranks, a rank keeps the states of its heads, and the projection
    that a checkpoint has in one tensor is several here.
    """

    fused: tuple[str, dict[str, int]] | None = None
    """The name of that tensor's module, and its parts with their output features; None: this rank
    has all of it."""

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index

    def _projections(
        self, name: str, parts: dict[str, int], tp: TensorParallel, whole: Container[str] = ()
    ) -> list[Projection]:
        """The projection ``name``, or its ``parts`` if ranks split them; each computes all of those
        in ``whole``."""
        if tp.size == 1:
            return [Projection.whole(name, sum(parts.values()))]
        self.fused = name, parts
        return [
            Projection.whole(part, size) if part in whole else Projection.even(part, size, tp)
            for part, size in parts.items()
        ]

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
        trace.call(self._advance_by_step, kernel, tensor, context.states, *arguments)

    def _advance_by_step(
        self, kernel: Callable[..., None], tensor: int, states: StateTables, *arguments: Any
    ) -> None:
        """Use the step of now: a tape repeats this call, and the step has changed by then."""
        step, table = states.step, states.layers[self.layer_index][tensor]
        steps = (step.indptr, step.rows, step.keep_indptr, step.keep_ends, step.keep_rows)
        kernel(*arguments, table, steps)


class CausalConvolution(nn.Module):
    """The weights of a convolution of each channel over its last inputs; a checkpoint has them as
    [channels, 1, taps].

    Args:
        projections: whose outputs side by side are the channels.
    """

    def __init__(self, projections: Sequence[Projection], taps: int, bias: bool) -> None:
        super().__init__()
        channels = sum(projection.rows for projection in projections)
        self.projections, self.channels, self.taps = projections, channels, taps
        self.weight = parameter(taps, channels)
        self.bias = nn.Parameter(torch.zeros(channels), requires_grad=False) if bias else None

    def state(self) -> CachedTensor:
        """The last inputs, in the model's dtype."""
        return CachedTensor((self.taps - 1, self.channels), self.weight.dtype)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        whole = sum(projection.size for projection in self.projections)
        shape = (whole, 1, self.taps)
        slot = WeightSlot(shape, self.weight, convert=lambda t: self._own(t.squeeze(1)).T)
        yield f"{path}.weight", slot
        if self.bias is not None:
            yield f"{path}.bias", WeightSlot((whole,), self.bias, convert=self._own)

    def _own(self, tensor: Tensor) -> Tensor:
        """The rows of this rank's channels."""
        parts = tensor.split([projection.size for projection in self.projections])
        own = zip(self.projections, parts, strict=True)
        return torch.cat([part.narrow(0, each.start, each.rows) for each, part in own])


class ShortConvolution(RecurrentBlock):
    """A convolution over a few tokens between two gates, which are projections as its input is
    (LFM2)."""

    def __init__(
        self, layer_index: int, hidden_size: int, taps: int, bias: bool, tp: TensorParallel
    ) -> None:
        super().__init__(layer_index)
        tp = ranks_of(tp, hidden_size)
        parts = dict.fromkeys(("in_proj_before", "in_proj_after", "in_proj_x"), hidden_size)
        self.in_proj = ColumnParallelLinear(
            hidden_size, self._projections("in_proj", parts, tp), bias
        )
        self.conv = CausalConvolution([Projection.even("conv", hidden_size, tp)], taps, bias)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias, tp)

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


def head_parameter(
    path: str, values: Tensor, tp: TensorParallel, negative_exp: bool = False
) -> tuple[str, WeightSlot]:
    """The slot of a float32 parameter of each of this rank's heads; ``negative_exp``: the checkpoint
    has ``log(-x)`` of it."""
    convert = (lambda t: -t.float().exp()) if negative_exp else None
    shape, start = (tp.size * len(values),), tp.rank * len(values)
    return path, WeightSlot(shape, values, start=start, convert=convert)


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

    def __init__(self, config: Any, layer_index: int, tp: TensorParallel) -> None:
        super().__init__(layer_index)
        hidden_size = config.hidden_size
        self.tiled = bool(getattr(config, "linear_value_heads_tiled", False))
        num_keys, num_heads = config.linear_num_key_heads, config.linear_num_value_heads
        # A tiled head's key may be another rank's.
        self.tp = tp = ranks_of(tp, 1 if self.tiled else num_keys, num_heads)
        self.num_key_heads, self.num_heads = num_keys // tp.size, num_heads // tp.size
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = num_keys * self.key_dim, num_heads * self.value_dim
        self.sizes = [size // tp.size for size in (keys, keys, values)]
        parts = {"in_proj_q": keys, "in_proj_k": keys, "in_proj_v": values}
        merged = self._projections("in_proj_qkv", parts, tp)
        gate = Projection.even("in_proj_z", values, tp)
        self.in_proj_qkvz = ColumnParallelLinear(hidden_size, [*merged, gate], bias=False)
        gates = [Projection.even(name, num_heads, tp) for name in ("in_proj_b", "in_proj_a")]
        self.in_proj_ba = ColumnParallelLinear(hidden_size, gates, bias=False)
        self.conv1d = CausalConvolution(merged, config.linear_conv_kernel_dim, bias=False)
        self.rate, self.dt_bias = (
            per_head(self.num_heads, DUMMY_RATE),
            per_head(self.num_heads, 1.0),
        )
        self.eps = config.rms_norm_eps
        self.norm = nn.Parameter(torch.ones(1, self.value_dim), requires_grad=False)
        self.out_proj = RowParallelLinear(values, hidden_size, False, tp)

    def state_spec(self) -> StateSpec:
        shape = (self.num_heads, self.key_dim, self.value_dim)
        return StateSpec((self.conv1d.state(), CachedTensor(shape, torch.float32)))

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        kernels = self.kernels.recurrence
        widths = (sum(self.sizes), self.num_heads * self.value_dim)
        inputs, gate = self.in_proj_qkvz.forward(hidden).split(widths, dim=-1)
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
        yield head_parameter(f"{path}.A_log", self.rate, self.tp, negative_exp=True)
        yield head_parameter(f"{path}.dt_bias", self.dt_bias, self.tp)
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

    def __init__(self, options: Mamba2Options, layer_index: int, tp: TensorParallel) -> None:
        super().__init__(layer_index)
        self.options = o = options
        # A norm runs over the heads of a group; keys and queries of one group serve all ranks.
        self.tp = tp = ranks_of(
            tp, o.num_heads, o.num_groups if o.has_norm or o.num_groups > 1 else tp.size
        )
        size, keys = o.num_heads * o.head_dim, o.num_groups * o.state_size
        parts = {
            "in_proj_z": size,
            "in_proj_x": size,
            "in_proj_k": keys,
            "in_proj_q": keys,
            "in_proj_dt": o.num_heads,
        }
        shared = ("in_proj_k", "in_proj_q") if o.num_groups < tp.size else ()
        projections = self._projections("in_proj", parts, tp, whole=shared)
        self.in_proj = ColumnParallelLinear(o.hidden_size, projections, o.bias)
        convolved = [Projection.whole("conv1d", size + 2 * keys)]
        if self.fused is not None:
            convolved = projections[1:4]
        self.conv1d = CausalConvolution(convolved, o.taps, o.conv_bias)
        self.num_heads, self.num_groups = o.num_heads // tp.size, max(1, o.num_groups // tp.size)
        size, keys = self.num_heads * o.head_dim, self.num_groups * o.state_size
        self.sizes = [size, keys, keys]
        self.parts = [size, sum(self.sizes), self.num_heads]
        self.rate, self.dt_bias, self.skip = (
            per_head(self.num_heads, value) for value in (DUMMY_RATE, 0.0, 1.0)
        )
        self.factors: Tensor | None = None
        if o.factors:
            counts = torch.tensor([size, *self.sizes, self.num_heads])
            factors = torch.tensor(o.factors, dtype=torch.get_default_dtype())
            self.factors = nn.Parameter(factors.repeat_interleave(counts), requires_grad=False)
        self.norm = None
        if o.has_norm:
            groups = self.num_groups
            self.norm = nn.Parameter(torch.ones(groups, size // groups), requires_grad=False)
        self.out_proj = RowParallelLinear(
            o.num_heads * o.head_dim, o.hidden_size, o.output_bias, tp
        )

    def state_spec(self) -> StateSpec:
        o = self.options
        shape = (self.num_heads, o.state_size, o.head_dim)
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
        value = value.unflatten(1, (self.num_heads, o.head_dim))
        query, key = (x.unflatten(1, (self.num_groups, o.state_size)) for x in (query, key))
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
        yield head_parameter(f"{path}.A_log", self.rate, self.tp, negative_exp=True)
        yield head_parameter(f"{path}.dt_bias", self.dt_bias, self.tp)
        yield head_parameter(f"{path}.D", self.skip, self.tp)
        if self.norm is not None:
            own = self.norm.numel()
            slot = WeightSlot((self.tp.size * own,), self.norm.view(-1), start=self.tp.rank * own)
            yield f"{path}.norm.weight", slot
