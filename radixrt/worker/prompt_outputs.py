"""What a step gives of the prompts themselves: log-probabilities of their tokens, and the vectors
or scores of prompts that sample no token."""

import numpy as np
import torch

from radixrt.device.device import Device
from radixrt.models.decoder import CausalLM
from radixrt.worker.batch import PooledRow, PromptSpan
from radixrt.worker.launched_step import SpanLogprobs, Vectors
from radixrt.worker.pooling import Pooler
from radixrt.worker.sampling.sampler import raw_logprobs

LOGITS_ROWS = 256
"""Prompt positions whose logits are in memory at once: 256 rows of a 128k vocabulary are 128
MiB."""


class PromptOutputs:
    """Reads prompts' outputs from the hidden states of a step."""

    def __init__(self, model: CausalLM, device: Device, pooler: Pooler | None) -> None:
        self._model = model
        self._device = device
        self._pooler = pooler

    def logprobs(self, spans: list[PromptSpan], hidden: torch.Tensor) -> list[SpanLogprobs]:
        """The log-probabilities of the prompts' tokens.

        Args:
            hidden: [num_tokens, hidden_size], of all tokens of the step.
        """
        parts: list[SpanLogprobs] = []
        for span in spans:
            (next_tokens,) = self._device.upload(span.next_tokens.astype(np.int64))
            for start in range(0, len(next_tokens), LOGITS_ROWS):
                part = next_tokens[start : start + LOGITS_ROWS]
                first = span.first_row + start
                logits = self._model.logits(hidden[first : first + len(part)])
                parts.append(SpanLogprobs(span, *raw_logprobs(logits, part, span.num_top)))
        return parts

    def vectors(self, pooled: list[PooledRow], hidden: torch.Tensor) -> Vectors | None:
        """The numbers of the prompts that end here and sample no token; None: there are none.

        Args:
            hidden: [num_tokens, hidden_size], of all tokens of the step.
        """
        if not pooled:
            return None
        rows = np.array([one.row for one in pooled], dtype=np.int64)
        if self._pooler is not None:
            (rows_there,) = self._device.upload(rows)
            values = self._pooler.vectors(hidden[rows_there])
            return Vectors([one.slot for one in pooled], [values.shape[1]] * len(rows), values)
        wanted = [one.pool.logits_of for one in pooled]
        lengths = [len(ids) for ids in wanted]
        padded = np.zeros((len(rows), max(lengths)), dtype=np.int64)
        for ids, row in zip(wanted, padded, strict=True):
            row[: len(ids)] = ids
        rows_there, ids_there = self._device.upload(rows, padded)
        values = self._model.logits(hidden[rows_there]).gather(1, ids_there)
        return Vectors([one.slot for one in pooled], lengths, values)
