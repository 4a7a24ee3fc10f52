"""Reads the tensors of GPTQ checkpoints (Frantar et al., 2022; AutoGPTQ's and GPTQModel's
layouts)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.matrix import LoadableMatrix, Placement
from radixrt.layers.quantization.groupwise import (
    GroupwiseMatrix,
    codes_of_words,
    pack_halves,
    unpack_halves,
)
from radixrt.layers.quantization.scheme import QuantizationScheme
from radixrt.layers.weights import WeightSlot


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
