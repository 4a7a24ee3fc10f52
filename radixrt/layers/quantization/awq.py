"""AWQ checkpoints (Lin et al., 2023; AutoAWQ's layout ``gemm``): what their tensors mean."""

from collections.abc import Iterator
from functools import partial

import torch

from radixrt.layers.matrix import MatrixFormat, Placement
from radixrt.layers.quantization.groupwise import GroupwiseMatrix, codes_of_words, pack_halves
from radixrt.layers.quantization.scheme import QuantizationScheme
from radixrt.layers.weights import WeightSlot

BITS = 4
CODES_A_WORD = 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Eight adjacent outputs share a word; output ``i`` is in its half-byte ``_PLACES[i]``."""


class AwqMatrix(GroupwiseMatrix):
    """In the checkpoint, with I input and O output features and G groups:

    ``qweight`` int32 [I, O / 8], ``qzeros`` int32 [G, O / 8], ``scales`` float16 [G, O].
    """

    def slots(self, placement: Placement) -> Iterator[tuple[str, WeightSlot]]:
        outputs, inputs = placement.size
        words, rows = outputs // CODES_A_WORD, placement.rows
        groups = -(-inputs // self.group_size) if self.columns < inputs else self.num_groups
        dim, group = placement.dim, self.first_group(placement)
        yield (
            f"{placement.name}.qweight",
            WeightSlot(
                (inputs, words),
                self.codes[rows],
                dim,
                self.first_code(placement),
                convert=lambda words: pack_halves(_outputs_first(words)),
                weights_an_element=CODES_A_WORD,
            ),
        )
        yield (
            f"{placement.name}.qzeros",
            WeightSlot(
                (groups, words),
                self.zeros[rows],
                dim,
                group,
                convert=_outputs_first,
                weights_an_element=0,
            ),
        )
        yield (
            f"{placement.name}.scales",
            WeightSlot(
                (groups, outputs),
                self.scales[rows],
                dim,
                group,
                convert=torch.t,
                weights_an_element=0,
            ),
        )


def awq_format(scheme: QuantizationScheme) -> MatrixFormat:
    return partial(AwqMatrix, bits=scheme.bits, group_size=scheme.group_size)


def _outputs_first(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, O / 8] -> uint8 [O, n]"""
    codes = codes_of_words(words, BITS).unflatten(1, (-1, CODES_A_WORD))
    return codes[:, :, _PLACES].flatten(1).t().contiguous()
