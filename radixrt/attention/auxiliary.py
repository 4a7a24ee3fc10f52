"""Keeps hidden states between the layers of a step, which a draft head reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from radixrt_kernels import trace


class AuxiliaryStates:
    """The residual stream before some layers, of every token of the last step.

    Layers compute what they compute without it: the states are copied.
    """

    def __init__(self, layers: Sequence[int], width: int, dtype: torch.dtype) -> None:
        """
        Args:
            layers: those before which states are kept; the first layer is 0, whose input are the
                embeddings.
            width: features of a state.
        """
        self._layers = tuple(layers)
        self._width = width
        self.rows = torch.empty(0, len(layers) * width, dtype=dtype)
        """[num_tokens or more, layers * width]: the states of each token, in the order of
        ``layers``. The next step overwrites them."""

    def keep(self, layer: int, residual: Tensor) -> None:
        """Copy the input [num_tokens, width] of a layer, if it is wanted."""
        for place, wanted in enumerate(self._layers):
            if wanted == layer:
                trace.call(self._copy, residual, place * self._width)

    def _copy(self, residual: Tensor, column: int) -> None:
        count = len(residual)
        if count > len(self.rows):
            self.rows = self.rows.new_empty(count, self.rows.shape[1])
        self.rows[:count, column : column + self._width] = residual
