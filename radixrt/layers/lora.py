"""Low-rank adapters (Hu et al., 2021) beside the matrix of a linear layer: each row has the adapter
of its sequence, or none. Nothing is merged into the matrix, so rows of many adapters and of the
base model share a step, and a row has the same bits in every one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixrt_kernels import lora, mixture


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one projection: ``up @ down`` is added to its weight."""

    down: Tensor  # [rank, input features]
    up: Tensor  # [output features, rank], with the scaling


class StepRows:
    """The rows of the step that is computed, by adapter. All stacks of a model share it."""

    def __init__(self, num_adapters: int) -> None:
        self._num_adapters = num_adapters
        self._adapters: Tensor | None = None
        self.groups: mixture.Groups | None = None
        """None: no row has an adapter, and the layers compute as if there were none."""

    def sort(self, adapters: Tensor) -> None:
        """Take the adapter of each row: [num_tokens] int64, ``num_adapters`` for none."""
        self._adapters = adapters
        self.groups = mixture.group_by_expert(adapters.unsqueeze(1), self._num_adapters + 1)

    def by_member(self, members: Tensor, count: int) -> mixture.Groups | None:
        """The pairs of a token and an expert or a head, by adapter and then by that; None: no row
        has an adapter.

        Args:
            members: [num_tokens, n] int64, the expert or head of each pair; ``count`` or more: one
                that this rank has not.
        """
        if self._adapters is None:
            return None
        none = self._num_adapters * count
        own = self._adapters.unsqueeze(1) * count + members
        pairs = torch.where(members < count, own, none).clamp(max=none)
        return mixture.group_by_expert(pairs.reshape(-1, 1), none + 1)

    def clear(self) -> None:
        self._adapters = self.groups = None


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
    ) -> None:
        """
        Args:
            widths: output features of each projection, on this rank.
            columns: input features, on this rank.
            rank: the largest of an adapter.
        """
        self._rows = rows
        self._widths = tuple(widths)
        self._rank = -(-rank // lora.PANEL) * lora.PANEL
        self._columns, self._dtype, self._members = columns, dtype, members
        parts, matrices = len(self._widths), num_adapters * members
        down, up = self._packed_down([None] * parts), self._packed_up([None] * parts)
        self._down, self._up = (one.new_zeros(matrices, *one.shape) for one in (down, up))
        self._ranks = torch.zeros(matrices, parts, dtype=torch.int32)
        self._width_of_part = torch.tensor(self._widths, dtype=torch.int32)

    def put(self, index: int, parts: Sequence[LowRank | None], member: int = 0) -> None:
        """Replace an adapter that no row has, of one member; None: it has nothing for that
        projection."""
        matrix = index * self._members + member
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
            self._add(hidden, groups.tokens, groups.starts, output)
        return output

    def add_by_member(
        self, hidden: Tensor, output: Tensor, members: Tensor, places: Tensor | None = None
    ) -> None:
        """As :meth:`add`, of the pairs of a token and a member.

        Args:
            hidden: [pairs, columns]
            output: [pairs, sum of widths]
            members: as of :meth:`StepRows.by_member`
            places: int32 of the shape of ``members``, the row of each pair; None: they are in order
        """
        groups = self._rows.by_member(members, self._members)
        if groups is None or not len(hidden):
            return
        rows = groups.tokens
        if places is not None:
            rows = places.flatten()[rows]
            if len(hidden) < len(rows):  # pairs of other ranks have no row
                rows = rows.clamp(max=len(hidden) - 1)
        self._add(hidden, rows, groups.starts, output)

    def _add(self, hidden: Tensor, rows: Tensor, starts: Tensor, output: Tensor) -> None:
        lora.add_lora_(
            hidden,
            rows,
            starts,
            self._down,
            self._up,
            self._rank,
            self._ranks,
            self._width_of_part,
            output,
        )

    def _packed_down(self, parts: Sequence[LowRank | None]) -> Tensor:
        merged = torch.zeros(len(parts), self._rank, self._columns, dtype=self._dtype)
        for place, part in zip(merged, parts, strict=True):
            if part is not None:
                place[: len(part.down)] = part.down
        return lora.pack_down(merged.flatten(0, 1))

    def _packed_up(self, parts: Sequence[LowRank | None]) -> Tensor:
        padded = []
        for width, part in zip(self._widths, parts, strict=True):
            weight = torch.zeros(width, self._rank, dtype=self._dtype)
            if part is not None:
                weight[:, : part.up.shape[1]] = part.up
            padded.append(weight)
        return lora.pack_up(padded)
