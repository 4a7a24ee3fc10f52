"""Describes the states of recurrent layers: what a layer keeps of a sequence, and a step over them.

A recurrent layer (a gated delta rule, Mamba 2, a short convolution) keeps one state of a sequence,
whatever its length, where attention keeps keys and values of each token. The states of all
sequences are rows of one table for each tensor. A row is the working state of a slot, which the
steps advance in place, or a kept state: that of a position in the radix tree, which is only copied.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from radixrt.attention.kv_spec import CachedTensor

LayerStates = tuple[Tensor, ...]
"""The states of one layer: for each tensor of its :class:`StateSpec` one of [num_rows, *shape]."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The state of one sequence in one layer, on this tensor-parallel rank.

    A short convolution over 3 tokens of 2,048 channels keeps the last two:

    >>> import torch
    >>> StateSpec((CachedTensor((2, 2048), torch.bfloat16),)).num_bytes
    8192
    """

    tensors: tuple[CachedTensor, ...] = ()
    """Tensors in the order of :data:`LayerStates`; none: the layer is no recurrent one."""

    @property
    def num_bytes(self) -> int:
        """Memory of one state."""
        return sum(math.prod(t.shape) * t.dtype.itemsize for t in self.tensors)


@dataclass(frozen=True, slots=True)
class StateStep:
    """The sequences of a step, as recurrent layers see them. All tensors are on the host.

    Sequence ``i`` has the tokens ``indptr[i]:indptr[i + 1]`` of the flat batch, at least one. Its
    state before the first of them is row ``rows[i]``, which afterwards holds its state behind the
    last. ``keep_*[keep_indptr[i]:keep_indptr[i + 1]]`` are the copies to make on the way: the state
    behind the token before ``keep_ends`` goes to row ``keep_rows``.
    """

    indptr: Tensor  # [sequences + 1] int32
    rows: Tensor  # [sequences] int32, all different
    keep_indptr: Tensor  # [sequences + 1] int32
    keep_ends: Tensor  # [keeps] int32, ascending in each sequence, in indptr[i] + 1..indptr[i + 1]
    keep_rows: Tensor  # [keeps] int32, all different, and none of ``rows``


class StateTables:
    """The states of all layers, and the step that is computed.

    Args:
        layers: one for each layer of the model; empty for layers without a state.
    """

    def __init__(self, layers: list[LayerStates]) -> None:
        self.layers = layers
        self._step: StateStep | None = None

    def plan(self, step: StateStep) -> None:
        """Prepare for one step; called once before the layers run."""
        self._step = step

    @property
    def step(self) -> StateStep:
        """The step that is computed. A tape repeats a layer's call with the step of its replay, so
        a layer reads it when its kernel runs."""
        assert self._step is not None, "plan() comes before a layer's step"
        return self._step

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put the states that the step advances back afterwards, so that it can be computed once
        more."""
        rows = self.step.rows.long()
        tables = [table for layer in self.layers for table in layer]
        before = [table[rows] for table in tables]
        yield
        for table, states in zip(tables, before, strict=True):
            table[rows] = states

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy states between rows, as if all at once.

        Args:
            pairs: (from, to); from -1: the state of an empty sequence, which is zeros.
        """
        if not pairs:
            return
        sources, targets = [max(source, 0) for source, _ in pairs], [row for _, row in pairs]
        empty = [row for source, row in pairs if source < 0]
        for table in (table for layer in self.layers for table in layer):
            table[targets] = table[sources]
            if empty:
                table[empty] = 0
