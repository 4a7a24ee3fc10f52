"""Replays steps on a CPU from tapes of their kernel calls, without the model's Python."""

import ctypes
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from radixrt.attention.backend import ForwardContext
from radixrt.models.decoder import CausalLM
from radixrt_kernels import tape

log = logging.getLogger(__name__)

MOST_TOKENS = 64
"""In larger steps the kernels take longer than the Python between them, and their sizes rarely recur."""

MOST_TOKENS_WITH_PROMPTS = 256
"""Chunks of prompts end with pages, and running answers are often as many as before, so the sizes of steps with prompts recur, too."""

MOST_RECORDED_BYTES = 192 << 20
"""During a recording, the intermediate tensors of all layers are in memory. Steps for which these are larger are not recorded."""

LEAST_BYTES_TO_GIVE_BACK = 32 << 20
"""After a recording with fewer, the next steps use their memory."""

COMPUTED_BEFORE = 1
"""Recording takes as long as ten replays save. Sizes of decode steps recur."""

COMPUTED_BEFORE_WITH_PROMPTS = 4
"""Sizes of steps with prompts recur less often."""


_malloc_trim: Callable[..., object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


class StepTapes:
    """One tape for each number of tokens, from token ids to hidden states. It is recorded when that number has occurred more
    than ``COMPUTED_BEFORE`` times. Of steps with prompts, few rows are wanted: behind the last attention these are computed without a tape.

    The backend of ``context`` must call its kernels by ``radixrt_kernels.tape``.
    """

    def __init__(self, model: CausalLM, context: ForwardContext) -> None:
        self._model = model
        self._context = context
        self._tapes: dict[tuple[int, bool], tape.Tape] = {}
        """By number of tokens, and whether it ends with the last attention."""
        self._times_computed: Counter[tuple[int, bool]] = Counter()
        self._memory: torch.Tensor | None = None
        """Of all tapes but the first; its pages become resident where a tape uses them."""
        self._bytes_per_token = 0
        """During a recording; 0 before the first."""
        self._recordable = True

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of the model's ``forward``, [num_tokens or len(rows), hidden_size]; the next step may overwrite it."""
        count = len(token_ids)
        by_rows = rows is not None and len(rows) < count and self._model.ends_by_rows
        if not self._recordable or count > (MOST_TOKENS_WITH_PROMPTS if by_rows else MOST_TOKENS):
            return self._model.forward(token_ids, positions, self._context, rows)
        if not by_rows:
            hidden: torch.Tensor = self._taped(token_ids, positions, by_rows)
            return hidden if rows is None else hidden[rows]
        hidden, residual = self._taped(token_ids, positions, by_rows)
        return self._model.after_last_attention(hidden[rows], residual[rows])

    def _taped(self, token_ids: torch.Tensor, positions: torch.Tensor, by_rows: bool) -> Any:
        """The result of the model, or, if ``by_rows``, of its part up to the last attention."""
        part = self._model.up_to_last_attention if by_rows else self._model.forward
        computed_before = COMPUTED_BEFORE_WITH_PROMPTS if by_rows else COMPUTED_BEFORE

        def compute(token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
            return part(token_ids, positions, self._context)

        kind = len(token_ids), by_rows
        if (known := self._tapes.get(kind)) is not None:
            return known.replay(token_ids, positions)
        self._times_computed[kind] += 1
        bytes_per_token = self._bytes_per_token or MOST_RECORDED_BYTES // MOST_TOKENS
        too_large = len(token_ids) * bytes_per_token > MOST_RECORDED_BYTES
        if self._times_computed[kind] <= computed_before or too_large:
            return compute(token_ids, positions)
        try:
            taped, result = tape.record(compute, token_ids, positions, memory=self._memory)
        except tape.NotRecordable as reason:
            log.info("Steps of this model are not taped: %s.", reason)
            self._recordable = False
            return compute(token_ids, positions)
        self._tapes[kind] = taped
        self._bytes_per_token = taped.recorded_bytes // len(token_ids)
        if taped.recorded_bytes >= LEAST_BYTES_TO_GIVE_BACK:
            _malloc_trim(0)
        if self._memory is None:
            most_bytes = 2 * taped.num_bytes // len(token_ids) * MOST_TOKENS_WITH_PROMPTS
            self._memory = torch.empty(most_bytes, dtype=torch.uint8)
        return result
