"""Quantizes a plain checkpoint while it is loaded: to the nearest code, with scales found by
search."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.layers.matrix import LoadableMatrix, Placement
from radixrt.layers.quantization.groupwise import SCALE_DTYPE, GroupwiseMatrix, pack_halves
from radixrt.layers.weights import WeightSlot

RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried at 4 bits: cutting outliers off makes the steps finer
for the rest."""

ROWS_AT_ONCE = 1 << 20
"""Weights rounded together, so that the passes over them stay in the cache."""


class RoundedMatrix(GroupwiseMatrix, LoadableMatrix):
    """In the checkpoint: the plain ``weight`` [output features, input features]."""

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        codes = self.codes[placement.rows]
        slot = WeightSlot(
            placement.size,
            codes,
            placement.dim,
            placement.start,
            count=self.columns if placement.dim == 1 else len(codes),
            store=partial(self._round, placement.rows),
        )
        yield f"{placement.name}.weight", slot

    def _round(self, rows: slice, weight: Tensor) -> None:
        """Fill ``rows`` with the codes, scales and zeros of ``weight`` [rows, columns]."""
        at_once = max(1, ROWS_AT_ONCE // self.columns)
        first = rows.start or 0
        for start in range(0, len(weight), at_once):
            part = weight[start : start + at_once]
            grouped = self._grouped(part.to(self.codes.device, torch.float32))
            codes, scales, zeros = quantize(grouped, self.bits, self.scheme.symmetric)
            codes = codes.flatten(1)[:, : self.columns]
            filled = slice(first + start, first + start + len(part))
            self.codes[filled] = pack_halves(codes) if self.bits == 4 else codes
            self.scales[filled], self.zeros[filled] = scales, zeros

    def _grouped(self, weight: Tensor) -> Tensor:
        """[rows, columns] -> [rows, groups, group_size]; a short last group is filled with its last
        weight."""
        missing = -weight.shape[1] % self.group_size
        if missing:
            weight = F.pad(weight[None], (0, missing), mode="replicate")[0]
        return weight.unflatten(1, (-1, self.group_size))


def quantize(groups: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros that approximate ``groups`` with little squared error.

    >>> codes, scales, zeros = quantize(torch.tensor([[[-1.0, 0.0, 0.5, 1.0]]]), bits=8, symmetric=True)
    >>> codes.shape, scales.shape, ((codes.float() - zeros[..., None].float()) * scales[..., None]).round(decimals=2)
    (torch.Size([1, 1, 4]), torch.Size([1, 1]), tensor([[[-1.0000,  0.0000,  0.5000,  1.0000]]]))

    Args:
        groups: float32 [rows, groups, group_size]
        symmetric: the zero is the middle of the codes, so that a weight of 0 and both signs are
            alike.

    Returns:
        codes uint8 [rows, groups, group_size], scales float16 and zeros uint8 [rows, groups]
    """
    best = _round(groups, bits, symmetric, RANGES[0])
    if bits > 4:
        return best
    least = _squared_error(groups, *best)
    for share in RANGES[1:]:
        candidate = _round(groups, bits, symmetric, share)
        error = _squared_error(groups, *candidate)
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better.unsqueeze(-1), candidate[0], best[0]),
            torch.where(better, candidate[1], best[1]),
            torch.where(better, candidate[2], best[2]),
        )
    return best


def _round(
    groups: Tensor, bits: int, symmetric: bool, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes over ``share`` of each group's range."""
    largest_code = (1 << bits) - 1
    smallest_scale = torch.finfo(SCALE_DTYPE).smallest_normal
    if symmetric:
        zero = 1 << (bits - 1)
        reach = groups.abs().amax(-1) * share
        scales = (reach / (largest_code - zero)).clamp(min=smallest_scale).to(SCALE_DTYPE)
        zeros = torch.full_like(scales, zero, dtype=torch.uint8)
    else:
        low, high = groups.amin(-1).clamp(max=0) * share, groups.amax(-1).clamp(min=0) * share
        scales = ((high - low) / largest_code).clamp(min=smallest_scale).to(SCALE_DTYPE)
        zeros = (-low / scales.float()).round().clamp(0, largest_code).to(torch.uint8)
    steps = (groups / scales.float().unsqueeze(-1)).round_()
    codes = steps.add_(zeros.unsqueeze(-1)).clamp_(0, largest_code).to(torch.uint8)
    return codes, scales, zeros


def _squared_error(groups: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """[rows, groups]"""
    decoded = (codes.float() - zeros.float().unsqueeze(-1)) * scales.float().unsqueeze(-1)
    return decoded.sub_(groups).square_().sum(-1)
