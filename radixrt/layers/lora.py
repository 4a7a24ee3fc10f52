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
        self.groups: mixture.Groups | None = None
        """None: no row has an adapter, and the layers compute as if there were none."""

    def sort(self, adapters: Tensor) -> None:
        """Take the adapter of each row: [num_tokens] int64, ``num_adapters`` for none."""
        self.groups = mixture.group_by_expert(adapters.unsqueeze(1), self._num_adapters + 1)

    def clear(self) -> None:
        self.groups = None


class LoraStack:
    """The adapters of one linear layer, whose projections are its parts; an adapter that has nothing
    for a part leaves its outputs as they are."""

    def __init__(
        self,
        widths: Sequence[int],
        columns: int,
        rank: int,
        rows: StepRows,
        num_adapters: int,
        dtype: torch.dtype,
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
        self._columns, self._dtype = columns, dtype
        parts = len(self._widths)
        self._down = torch.stack([self._packed_down([None] * parts)] * num_adapters)
        self._up = torch.stack([self._packed_up([None] * parts)] * num_adapters)
        self._ranks = torch.zeros(num_adapters, parts, dtype=torch.int32)
        self._width_of_part = torch.tensor(self._widths, dtype=torch.int32)

    def put(self, index: int, parts: Sequence[LowRank | None]) -> None:
        """Replace an adapter that no row has; None: it has nothing for that projection."""
        self._down[index] = self._packed_down(parts)
        self._up[index] = self._packed_up(parts)
        ranks = [0 if part is None else len(part.down) for part in parts]
        self._ranks[index] = torch.tensor(ranks, dtype=torch.int32)

    def add(self, hidden: Tensor, output: Tensor) -> Tensor:
        """Add what the rows' adapters make of them, in place.

        Args:
            hidden: [num_tokens, columns], the layer's input
            output: [num_tokens, sum of widths]
        """
        if (groups := self._rows.groups) is not None:
            lora.add_lora_(
                hidden,
                groups.tokens,
                groups.starts,
                self._down,
                self._up,
                self._rank,
                self._ranks,
                self._width_of_part,
                output,
            )
        return output

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
