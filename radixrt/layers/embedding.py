"""Token embedding and LM head, split over ranks by vocabulary."""

from collections.abc import Iterator

import torch
from torch import Tensor

from radixrt.layers.matrix import EmbeddingMatrix, MatrixLayer, Placement
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot


class VocabParallelEmbedding(MatrixLayer):
    """Rank ``r`` holds rows ``r * rows`` to ``(r + 1) * rows``; those of the last rank may be
    padding.

    A model with tied embeddings has one instance for both, so its matrix must multiply and look
    rows up.
    """

    matrix: EmbeddingMatrix

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__(-(-vocab_size // tp.size), hidden_size)
        self.tp = tp
        self.vocab_size = vocab_size
        self.first = tp.rank * self.rows

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        if self.tp.size == 1:
            return self.matrix.look_up(input_ids)
        ours = (input_ids >= self.first) & (input_ids < self.first + self.rows)
        embedded = self.matrix.look_up(torch.where(ours, input_ids - self.first, 0))
        return self.tp.all_reduce(torch.where(ours[:, None], embedded, 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the whole vocabulary, on every rank: [rows, hidden_size] -> [rows, vocab_size]
        float32, without gaps"""
        padded = self.tp.all_gather(self.matrix.scores(hidden))
        return padded[:, : self.vocab_size].float().contiguous()

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        real_rows = max(0, min(self.rows, self.vocab_size - self.first))
        start = min(self.first, self.vocab_size)
        size = (self.vocab_size, self.columns)
        yield from self.loadable.slots(Placement(path, size, slice(0, real_rows), 0, start))


class LookUpTable(VocabParallelEmbedding):
    """An embedding by which nothing is multiplied; it may be larger than all other weights (Gemma
    4's inputs of each layer)."""

    packs = False
