"""The matrix of all quantized linear layers: codes of 4 or 8 bits, and a scale and a zero for each
group; the tensors of AWQ and GPTQ checkpoints; and the rounding of plain ones.

Every format of a checkpoint is brought into this one form while it is loaded, so kernels know only
this.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.matrix import DecodableMatrix, EmbeddingMatrix, LoadableMatrix, Placement
from radixrt.layers.quantization.scheme import QuantizationScheme
from radixrt.layers.weights import WeightSlot

SCALE_DTYPE = torch.float16
"""That of AWQ's and GPTQ's checkpoints."""


Convert = Callable[[Tensor], Tensor]


class GroupwiseMatrix(EmbeddingMatrix, DecodableMatrix):
    """``weight[row, column] = (code - zero) * scale``, the last two of the group that holds the
    column.

    ``codes`` is uint8 [rows, ceil(columns * bits / 8)]; of 4 bits, the even column is the low half
    of a byte. ``zeros`` is uint8 and ``scales`` float16, both [rows, num_groups]; the last group
    may be shorter than ``group_size``. Where ``column_order`` (int64 [columns]) is not None, the
    columns stand in another order than the input features: column ``i`` belongs to feature
    ``column_order[i]``.

    The subclasses load a checkpoint's tensors into it (``slots``). It multiplies on any device, and
    is the reference of the kernels.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    column_order: Tensor | None

    def __init__(self, rows: int, columns: int, scheme: QuantizationScheme) -> None:
        super().__init__(rows, columns)
        self.scheme = scheme
        self.bits = bits = scheme.bits
        self.group_size = min(scheme.group_size or columns, columns)
        self.num_groups = -(-columns // self.group_size)
        self.dtype = torch.get_default_dtype()
        groups = (rows, self.num_groups)
        self.register_buffer("codes", torch.zeros(rows, -(-columns * bits // 8), dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(groups, dtype=SCALE_DTYPE))
        self.register_buffer("zeros", torch.zeros(groups, dtype=torch.uint8))
        self.register_buffer("column_order", None)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        if self.column_order is not None:
            hidden = hidden[:, self.column_order]
        return F.linear(hidden, self.dequantized(), bias)

    def look_up(self, rows: Tensor) -> Tensor:
        return self.plain(rows)

    def dequantized(self) -> Tensor:
        """[rows, columns] of the model's dtype, the columns as they stand."""
        return self._decode(self.codes, self.scales, self.zeros)

    def plain(self, rows: slice | Tensor) -> Tensor:
        assert self.column_order is None, (
            "the columns of embeddings and of experts stand in their order"
        )
        return self._decode(self.codes[rows], self.scales[rows], self.zeros[rows])

    def codes_of(self, rows: slice) -> Tensor:
        """One byte each: uint8 [n, columns]"""
        codes = self.codes[rows]
        return codes if self.bits == 8 else unpack_halves(codes)[:, : self.columns]

    def _decode(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        if self.bits == 4:
            codes = unpack_halves(codes)[:, : self.columns]
        zeros, scales = (
            of_groups.repeat_interleave(self.group_size, dim=1)[:, : self.columns]
            for of_groups in (zeros, scales)
        )
        return ((codes.float() - zeros.float()) * scales.float()).to(self.dtype)

    def slots_of_words(
        self, placement: Placement, shape: tuple[int, int], codes: Convert, zeros: Convert
    ) -> Iterator[tuple[str, WeightSlot]]:
        """The slots of ``qweight``, ``qzeros`` and ``scales`` as AWQ and GPTQ keep them: input
        features first, codes in int32 words.

        Args:
            shape: of ``qweight``.
            codes, zeros: from the words of ``qweight`` and ``qzeros`` to ``codes`` and ``zeros`` as
                they are here.
        """
        outputs, inputs = placement.size
        a_word = 32 // self.bits
        groups, group = -(-inputs // self.group_size), self.first_group(placement)
        for name, size, target, start, convert, weights in (
            ("qweight", shape, self.codes, self.first_code(placement), codes, a_word),
            ("qzeros", (groups, outputs // a_word), self.zeros, group, zeros, 0),
            ("scales", (groups, outputs), self.scales, group, torch.t, 0),
        ):
            rows = target[placement.rows]
            slot = WeightSlot(size, rows, placement.dim, start, convert, weights)
            yield f"{placement.name}.{name}", slot

    def first_code(self, placement: Placement) -> int:
        """First index of this rank's part in dimension ``placement.dim`` of the whole projection's
        ``codes``."""
        return placement.start * self.bits // 8 if placement.dim == 1 else placement.start

    def first_group(self, placement: Placement) -> int:
        """First index of this rank's part in dimension ``placement.dim`` of the whole projection's
        ``scales``.

        Raises:
            ConfigError: the part does not begin with a group.
        """
        if placement.dim == 0:
            return placement.start
        whole = self.columns == placement.size[1]
        if not whole and (placement.start % self.group_size or self.columns % self.group_size):
            raise ConfigError(
                f"The {placement.size[1]} input features of {placement.name} cannot be split over --tp ranks between "
                f"its quantization groups of {self.group_size}; choose a smaller --tp."
            )
        return placement.start // self.group_size


class PackedGroupwiseMatrix(EmbeddingMatrix):
    """A quantized matrix in the order in which some kernels read it."""

    column_order: Tensor | None

    def __init__(self, matrix: GroupwiseMatrix, pack: Callable[..., Any]) -> None:
        """
        Args:
            pack: makes the kernels' form from codes [rows, columns], scales, zeros, bits and group
                size.
        """
        super().__init__(matrix.rows, matrix.columns)
        codes = matrix.codes_of(slice(None))
        self.packed = pack(codes, matrix.scales, matrix.zeros, matrix.bits, matrix.group_size)
        self.dtype = matrix.dtype
        self.register_buffer("codes", self.packed.codes)
        self.register_buffer("scales", self.packed.scales)
        self.register_buffer("zeros", self.packed.zeros)
        self.register_buffer("column_order", matrix.column_order)

    def multiply(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        return self.multiply_packed(self.in_order(hidden), bias)

    def in_order(self, hidden: Tensor) -> Tensor:
        """The features in the order of the columns."""
        return hidden if self.column_order is None else hidden[:, self.column_order]

    @abstractmethod
    def multiply_packed(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        """As ``multiply``, of features in the order of the columns."""


def pack_halves(codes: Tensor) -> Tensor:
    """uint8 [rows, columns] below 16 -> uint8 [rows, ceil(columns / 2)], the even column in the low
    half."""
    if codes.shape[1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_halves(packed: Tensor) -> Tensor:
    """The reverse of ``pack_halves``: uint8 [rows, 2 * bytes]"""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def codes_of_words(words: Tensor, bits: int) -> Tensor:
    """The codes of int32 words, the lowest bits first: [rows, words] -> uint8 [rows, words * 32 /
    bits]"""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


BITS = 4
CODES_A_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Eight adjacent outputs share a word; output ``i`` is in its half-byte ``_PLACES[i]``."""


class AwqMatrix(GroupwiseMatrix, LoadableMatrix):
    """In the checkpoint, with I input and O output features and G groups:

    ``qweight`` int32 [I, O / 8], ``qzeros`` int32 [G, O / 8], ``scales`` float16 [G, O].
    """

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        outputs, inputs = placement.size
        return self.slots_of_words(
            placement,
            (inputs, outputs // CODES_A_WORD),
            codes=lambda words: pack_halves(_outputs_first(words)),
            zeros=_outputs_first,
        )


def _outputs_first(words: Tensor) -> Tensor:
    """int32 [n, O / 8] -> uint8 [O, n]"""
    codes = codes_of_words(words, BITS).unflatten(1, (-1, CODES_A_WORD))
    return codes[:, :, _PLACES].flatten(1).t().contiguous()


class GptqMatrix(GroupwiseMatrix, LoadableMatrix):
    """In the checkpoint, with I input and O output features, G groups and C codes in 32 bits:

    ``qweight`` int32 [I / C, O], ``qzeros`` int32 [G, O / C], ``scales`` float16 [G, O], and
    ``g_idx`` int32 [I]: the group of each input feature. With activation order the groups are
    scattered over the features; then the columns are sorted by their group when all is loaded.
    """

    def __init__(self, rows: int, columns: int, scheme: QuantizationScheme) -> None:
        super().__init__(rows, columns, scheme)
        self._groups_of_features: dict[str, Tensor] = {}
        """int32 [columns] of each projection."""

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        outputs, inputs = placement.size
        if self.scheme.activation_order and self.columns < inputs:
            raise ConfigError(
                f"{placement.name} is quantized with GPTQ's desc_act, whose groups cannot be split over --tp ranks; "
                "choose a checkpoint without desc_act, or --tp 1."
            )
        words = (inputs * self.bits // 32, outputs)
        yield from self.slots_of_words(placement, words, codes=self._codes, zeros=self._zeros)
        table = self._groups_of_features.setdefault(
            placement.name, torch.empty(self.columns, dtype=torch.int32, device=self.codes.device)
        )
        first = placement.start if placement.dim == 1 else 0
        yield (
            f"{placement.name}.g_idx",
            WeightSlot((inputs,), table, 0, first, weights_an_element=0),
        )

    def finish(self) -> None:
        """Sort the columns by their groups.

        Raises:
            ConfigError: the table of groups has no such order, or the merged projections differ in
                it.
        """
        tables = list(self._groups_of_features.items())
        self._groups_of_features = {}
        if not self.scheme.activation_order or not tables:
            return
        (first_name, table), *others = tables
        for name, other in others:
            if not torch.equal(table, other):
                raise ConfigError(
                    f"The checkpoint's {first_name}.g_idx and {name}.g_idx differ, so the two cannot be computed "
                    "together; choose a checkpoint without desc_act."
                )
        order = table.argsort(stable=True)
        expected = torch.arange(self.columns, device=table.device) // self.group_size
        if not torch.equal(table[order], expected.int()):
            raise ConfigError(
                f"The checkpoint's {first_name}.g_idx does not describe groups of {self.group_size}."
            )
        if torch.equal(table, expected.int()):
            return
        if self.bits == 4:
            self.codes = pack_halves(unpack_halves(self.codes)[:, order])
        else:
            self.codes = self.codes[:, order]
        self.column_order = order

    def _codes(self, words: Tensor) -> Tensor:
        """int32 [I / C, O] -> as ``codes`` [O, bytes]"""
        codes = codes_of_words(words.t().contiguous(), self.bits)
        return pack_halves(codes) if self.bits == 4 else codes

    def _zeros(self, words: Tensor) -> Tensor:
        """int32 [G, O / C] -> uint8 [O, G]. In the format that stores zeros less one, a stored 15
        (255) means 0: its writers add one and drop the carry."""
        zeros = codes_of_words(words, self.bits).t()
        return (zeros + 1) & ((1 << self.bits) - 1) if self.scheme.zeros_less_one else zeros


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
