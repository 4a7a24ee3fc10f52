"""Logits of a vocabulary that ranks share."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import radixrt_kernels
from radixrt.layers.kernels.native import PackedMatrix
from radixrt.layers.linear import VocabParallelEmbedding
from radixrt.layers.matrix import DenseMatrix, EmbeddingMatrix
from radixrt.layers.parallel import TensorParallel

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason=f"no native kernels: {radixrt_kernels.missing_because}"
)

VOCAB_SIZE, HIDDEN_SIZE = 383, 64


class TwoAlike(TensorParallel):
    """Two ranks with the same weights."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor], dim=-1)


def in_bfloat16(tp: TensorParallel) -> tuple[VocabParallelEmbedding, DenseMatrix]:
    """An embedding without its matrix, and random weights for it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        embedding = VocabParallelEmbedding(VOCAB_SIZE, HIDDEN_SIZE, tp)
        dense = DenseMatrix(embedding.rows, HIDDEN_SIZE)
    finally:
        torch.set_default_dtype(torch.float32)
    dense.weight.data = torch.randn(embedding.rows, HIDDEN_SIZE).bfloat16()
    return embedding, dense


@pytest.mark.parametrize("form", [lambda dense: dense, PackedMatrix], ids=["plain", "packed"])
def test_logits_have_no_gaps_where_the_last_rank_has_padding(
    form: Callable[[DenseMatrix], EmbeddingMatrix],
) -> None:
    """The kernels that sample find a row by the number of logits."""
    embedding, dense = in_bfloat16(TwoAlike(size=2))
    embedding.matrix = form(dense)
    hidden = torch.randn(3, HIDDEN_SIZE).bfloat16()
    logits = embedding.logits(hidden)
    assert logits.shape == (3, VOCAB_SIZE) and logits.dtype == torch.float32
    assert logits.is_contiguous()
    expected = hidden.float() @ dense.weight.float().T
    torch.testing.assert_close(logits[:, 192:], expected[:, :191], rtol=1e-2, atol=1e-1)


def test_native_kernels_do_not_round_logits() -> None:
    embedding, dense = in_bfloat16(TensorParallel())
    hidden = torch.randn(3, HIDDEN_SIZE).bfloat16()
    exact = hidden.float() @ dense.weight.float().T
    embedding.matrix = PackedMatrix(dense)
    torch.testing.assert_close(embedding.logits(hidden), exact, rtol=1e-5, atol=1e-4)
