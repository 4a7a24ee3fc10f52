"""The two ends of a model, both split over ranks by vocabulary: token embedding and LM head."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot, parameter


class VocabParallelEmbedding(nn.Module):
    """Rank ``r`` holds rows ``r * rows`` to ``(r + 1) * rows``; the last rank's may be padding."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        rows = -(-vocab_size // tp.size)
        self.first = tp.rank * rows
        self.weight = parameter(rows, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]"""
        if self.tp.size == 1:
            return F.embedding(input_ids, self.weight)
        rows = self.weight.shape[0]
        ours = (input_ids >= self.first) & (input_ids < self.first + rows)
        embedded = F.embedding(torch.where(ours, input_ids - self.first, 0), self.weight)
        return self.tp.all_reduce(torch.where(ours[:, None], embedded, 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the whole vocabulary, on every rank: [rows, hidden_size] -> [rows, vocab_size]"""
        return self.tp.all_gather(F.linear(hidden, self.weight))[:, : self.vocab_size]

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        rows, hidden_size = self.weight.shape
        real_rows = max(0, min(rows, self.vocab_size - self.first))
        start = min(self.first, self.vocab_size)
        yield (
            f"{path}.weight",
            WeightSlot((self.vocab_size, hidden_size), self.weight[:real_rows], 0, start),
        )
