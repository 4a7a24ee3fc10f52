"""Copies of rows of the LM head, in 8 bits: what an MTP layer drafts where the vocabulary is large
(FR-Spec, Zhao et al., 2025).

The product with all rows would take most of a draft's time. Every draft is verified, so the tokens
that cannot be drafted cost acceptance and change no answer.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.matrix import DenseMatrix, MatrixFormat, Placement
from radixrt.layers.quantization.formats import matrix_formats
from radixrt.layers.quantization.scheme import ROUNDINGS
from radixrt.models.decoder import CausalLM
from radixrt.models.loader import default_dtype

PIECE = 256
"""Rows of the tokens of texts, whose memory is taken together."""


class CopiedRows(nn.Module):
    """A matrix of rows of a model's LM head, which may be replaced by others.

    Args:
        model: loaded and packed.
        count: its rows, at first of zeros or of any numbers.
        kernels: where they have no product in 8 bits, rows are kept in the model's dtype.
    """

    def __init__(self, model: CausalLM, count: int, kernels: LayerKernels) -> None:
        super().__init__()
        self._look_up, self._scaled = model.output_head.forward, model.scaled
        self._format: MatrixFormat = DenseMatrix
        if kernels.multiplies_blocks:
            self._format = matrix_formats(ROUNDINGS["int8"], tied_head=False)("lm_head", ())
        with default_dtype(model.dtype):
            self.matrix: Any = kernels.pack(self._format(count, model.output_head.columns))

    @torch.inference_mode()
    def copy(self, token_ids: Tensor, places: Tensor) -> None:
        """Put the rows of these tokens [n] into the rows ``places`` [n] of the matrix."""
        rows = self._format(len(token_ids), self.matrix.columns)
        whole = Placement("rows", (rows.rows, rows.columns), slice(0, rows.rows), 0, 0)
        ((_, slot),) = rows.slots(whole)
        slot.load(self._look_up(token_ids))
        self.matrix.replace(places, rows)

    def another(self) -> "CopiedRows":
        """A further matrix with the same rows: packing an empty one takes ten times as long."""
        shared = (self._look_up, self._scaled)
        return copy.deepcopy(self, {id(one): one for one in shared})

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, count] float32, as of the model"""
        scores: Tensor = self.matrix.scores(hidden)
        return self._scaled(scores.float())
