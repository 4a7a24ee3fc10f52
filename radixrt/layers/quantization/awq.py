"""Reads the tensors of AWQ checkpoints (Lin et al., 2023; AutoAWQ's layout ``gemm``)."""

from collections.abc import Iterator

from torch import Tensor

from radixrt.layers.matrix import LoadableMatrix, Placement
from radixrt.layers.quantization.groupwise import GroupwiseMatrix, codes_of_words, pack_halves
from radixrt.layers.weights import WeightSlot

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
