"""Replays steps on a CPU from tapes of their kernel calls, without the model's Python."""

import logging

import torch

from radixrt.attention.backend import ForwardContext
from radixrt.models.decoder import CausalLM
from radixrt_kernels import tape

log = logging.getLogger(__name__)

MOST_TOKENS = 64
"""In larger steps the kernels take much longer than the Python between them. A tape takes about a megabyte, and some
kilobytes per token."""

COMPUTED_BEFORE = 1
"""Recording takes as long as ten replays save. Sizes of decode steps recur, those of prompts rarely do."""


class StepTapes:
    """One tape for each number of tokens, from token ids to hidden states. It is recorded when that number has occurred more
    than ``COMPUTED_BEFORE`` times.

    The backend of ``context`` must call its kernels by ``radixrt_kernels.tape``.
    """

    def __init__(self, model: CausalLM, context: ForwardContext) -> None:
        self._model = model
        self._context = context
        self._tapes: dict[int, tape.Tape] = {}
        self._times_computed = [0] * (MOST_TOKENS + 1)
        """By number of tokens."""
        self._recordable = True

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of the model's ``forward``, [num_tokens or len(rows), hidden_size]; the next step may overwrite it."""
        count = len(token_ids)
        if count > MOST_TOKENS or not self._recordable:
            return self._model.forward(token_ids, positions, self._context, rows)
        hidden = self._of_every_row(token_ids, positions)
        return hidden if rows is None else hidden[rows]

    def _of_every_row(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        count = len(token_ids)
        if count in self._tapes:
            return self._tapes[count].replay(token_ids, positions)
        self._times_computed[count] += 1
        if self._times_computed[count] <= COMPUTED_BEFORE:
            return self._compute(token_ids, positions)
        try:
            self._tapes[count], hidden = tape.record(self._compute, token_ids, positions)
        except tape.NotRecordable as reason:
            log.info("Steps of this model are not taped: %s.", reason)
            self._recordable = False
            return self._compute(token_ids, positions)
        return hidden

    def _compute(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._model.forward(token_ids, positions, self._context)
