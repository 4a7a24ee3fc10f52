"""Low-rank adapters (Hu et al., 2021) beside the matrix of a linear layer: each row has the adapter
of its sequence, or none. Nothing is merged into the matrix, so rows of many adapters and of the
base model share a step, and a row has the same bits in every one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one projection: ``up @ down`` is added to its weight."""

    down: Tensor  # [rank, input features]
    up: Tensor  # [output features, rank], with the scaling


class LoraKernels(Protocol):
    """The products of adapters on a device: :mod:`radixrt_kernels.lora` or
    :mod:`radixrt_kernels.triton.lora`, which describe these functions."""

    @property
    def PANEL(self) -> int:
        """Ranks are padded to a multiple of it."""

    def group_rows(self, adapters: Tensor, count: int) -> Any: ...

    def pack_down(self, weight: Tensor) -> Tensor: ...

    def pack_up(self, weights: list[Tensor]) -> Tensor: ...

    def add_lora_(
        self,
        hidden: Tensor,
        groups: Any,
        down: Tensor,
        up: Tensor,
        rank: int,
        ranks: Tensor,
        widths: Tensor,
        output: Tensor,
        places: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None: ...


class StepRows:
    """The rows of the step that is computed, by adapter. All stacks of a model share it."""

    def __init__(self, num_adapters: int, kernels: LoraKernels) -> None:
        self.kernels = kernels
        self._num_adapters = num_adapters
        self._adapters: Tensor | None = None
        self._members: Tensor | None = None
        self._by_member: Any = None
        """What :meth:`by_member` made of ``_members``."""
        self.groups: Any = None
        """What ``kernels.group_rows`` made of the rows. None: no row has an adapter, and the layers
        compute as if there were none."""

    def padded(self, rank: int) -> int:
        """The rank that a stack has for adapters of a rank."""
        return -(-rank // self.kernels.PANEL) * self.kernels.PANEL

    def sort(self, adapters: Tensor) -> None:
        """Take the adapter of each row: [num_tokens] int64, ``num_adapters`` for none."""
        self.clear()
        self._adapters = adapters
        self.groups = self.kernels.group_rows(adapters, self._num_adapters)

    @contextmanager
    def use(self, adapters: Tensor) -> Iterator[None]:
        """Let the layers compute these rows while the block runs, see :meth:`sort`."""
        self.sort(adapters)
        try:
            yield
        finally:
            self.clear()

    def by_member(self, members: Tensor, count: int) -> Any:
        """The pairs of a token and an expert or a head, by adapter and then by that; None: no row
        has an adapter.

        Args:
            members: [num_tokens, n] int64, the expert or head of each pair; ``count`` or more: one
                that this rank has not. Several calls in turn with one tensor sort it once.
        """
        if self._adapters is None:
            return None
        if members is not self._members:
            none = self._num_adapters * count
            own = self._adapters.unsqueeze(1) * count + members
            pairs = torch.where(members < count, own, none).clamp(max=none)
            self._members, self._by_member = members, self.kernels.group_rows(pairs.flatten(), none)
        return self._by_member

    def clear(self) -> None:
        self._adapters = self.groups = self._members = self._by_member = None


class LoraStack:
    """The adapters of one linear layer, whose projections are its parts; an adapter that has nothing
    for a part leaves its outputs as they are.

    The experts of a mixture, or the heads of latent attention, are *members* of one stack: each has
    a matrix of its own, and the same parts.
    """

    def __init__(
        self,
        widths: Sequence[int],
        columns: int,
        rank: int,
        rows: StepRows,
        num_adapters: int,
        dtype: torch.dtype,
        members: int = 1,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            widths: output features of each projection, on this rank.
            columns: input features, on this rank.
            rank: the largest of an adapter.
            device: of the layer; None: the CPU.
        """
        self._rows, self._kernels = rows, rows.kernels
        self._widths = tuple(widths)
        self._rank = rows.padded(rank)
        self._columns, self._dtype, self._members = columns, dtype, members
        parts, matrices = len(self._widths), num_adapters * members
        down, up = self._packed_down([None] * parts), self._packed_up([None] * parts)
        self._down, self._up = (
            torch.zeros(matrices, *one.shape, dtype=dtype, device=device) for one in (down, up)
        )
        self._ranks = torch.zeros(matrices, parts, dtype=torch.int32, device=device)
        self._width_of_part = torch.tensor(self._widths, dtype=torch.int32, device=device)

    @property
    def rank(self) -> int:
        """The largest of an adapter that it has room for."""
        return self._rank

    def take(self, other: "LoraStack") -> None:
        """Copy the adapters of a stack of the same layer and of a smaller rank, beside a step. Their
        rows of zeros change no bit of what they add."""
        parts = len(self._widths)
        down, theirs = (one._down.unflatten(1, (parts, -1)) for one in (self, other))
        down[:, :, : theirs.shape[2]] = theirs
        self._up[:, :, : other._rank] = other._up
        self._ranks.copy_(other._ranks)

    def put(self, index: int, members: Sequence[Sequence[LowRank | None]]) -> None:
        """Replace an adapter that no row has, beside a step.

        Args:
            members: the parts of each; None: it has nothing for that projection.
        """
        for matrix, parts in enumerate(members, index * self._members):
            ranks = [0 if part is None else len(part.down) for part in parts]
            self._ranks[matrix] = torch.tensor(ranks, dtype=torch.int32)
            if any(ranks):
                self._down[matrix] = self._packed_down(parts)
                self._up[matrix] = self._packed_up(parts)

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        """Add what the rows' adapters make of them, in place.

        Args:
            hidden: [num_tokens, columns], the layer's input
            output: [num_tokens, sum of widths]
        """
        if (groups := self._rows.groups) is not None:
            self._kernels.add_lora_(hidden, groups, *self._stacks, output)
        return output

    def add_by_member(
        self,
        hidden: Tensor,
        output: Tensor,
        members: Tensor,
        places: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        """As :meth:`add`, of the pairs of a token and a member.

        Args:
            hidden: [pairs, columns]; on a GPU also [num_tokens, columns]
            output: [pairs, sum of widths]
            members: as of :meth:`StepRows.by_member`
            places: int32 of the shape of ``members``, the row of each pair; None: they are in order
            factors: float32 [pairs], of what is added to each, on a GPU; None: 1
        """
        groups = self._rows.by_member(members, self._members)
        if groups is not None and len(hidden):
            self._kernels.add_lora_(hidden, groups, *self._stacks, output, places, factors)

    @property
    def _stacks(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
        return self._down, self._up, self._rank, self._ranks, self._width_of_part

    def _packed_down(self, parts: Sequence[LowRank | None]) -> Tensor:
        merged = torch.zeros(len(parts), self._rank, self._columns, dtype=self._dtype)
        for place, part in zip(merged, parts, strict=True):
            if part is not None:
                place[: len(part.down)] = part.down
        return self._kernels.pack_down(merged.flatten(0, 1))

    def _packed_up(self, parts: Sequence[LowRank | None]) -> Tensor:
        padded = []
        for width, part in zip(self._widths, parts, strict=True):
            weight = torch.zeros(width, self._rank, dtype=self._dtype)
            if part is not None:
                weight[:, : part.up.shape[1]] = part.up
            padded.append(weight)
        return self._kernels.pack_up(padded)
