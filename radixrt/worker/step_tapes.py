"""Replays steps on a CPU from tapes of their kernel calls, without the model's Python."""

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from radixrt.attention.backend import ForwardContext
from radixrt.models.decoder import CausalLM
from radixrt_kernels.tape import NotRecordable, Tape, Tapes

log = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Tokens of a step whose rows are all wanted. In larger ones the kernels take longer than the
Python between them."""

MAX_TOKENS_WITH_PROMPTS = 1024
"""Tokens of a step of which few rows are wanted. The tensors of its tape stay in the caches, where
tensors that are allocated anew for each layer do not."""

MAX_KEPT = 128
"""Tapes; another one is made in a millisecond or two."""


class StepTapes:
    """A tape for each number of tokens, from token ids to hidden states. Of steps with prompts, few
    rows are wanted: behind the last attention these are computed without a tape.

    The backend of ``context`` must call its kernels by ``radixrt_kernels.tape``.
    """

    def __init__(self, model: CausalLM, context: ForwardContext) -> None:
        self._model = model
        self._context = context
        self._tapes = _tapes_of(model, context)
        """The tapes, by whether they end with the last attention. None: this model has none."""
        self._tape_of = functools.lru_cache(MAX_KEPT)(self._make)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The result of the model's ``forward``, [num_tokens or len(rows), hidden_size]; the next
        step may overwrite it."""
        count = len(token_ids)
        by_rows = rows is not None and len(rows) < count and self._model.ends_by_rows
        is_small = count <= (MAX_TOKENS_WITH_PROMPTS if by_rows else MAX_TOKENS)
        tape = self._tape_of(count, by_rows) if is_small else None
        if tape is None:
            return self._model.forward(token_ids, positions, self._context, rows)
        if by_rows:
            hidden, residual = tape.replay(token_ids, positions)
            return self._model.after_last_attention(hidden[rows], residual[rows])
        whole: torch.Tensor = tape.replay(token_ids, positions)
        return whole if rows is None else whole[rows]

    def _make(self, count: int, by_rows: bool) -> Tape | None:
        """The tape of a whole step, or of its part up to the last attention."""
        if self._tapes is None:
            return None
        return self._tapes[by_rows].of(count, self._memory)

    @functools.cached_property
    def _memory(self) -> torch.Tensor:
        """The memory of all tapes; its pages become resident where a tape uses them."""
        assert self._tapes is not None
        most = {False: MAX_TOKENS, True: MAX_TOKENS_WITH_PROMPTS}
        num_bytes = max(tapes.num_bytes(most[by_rows]) for by_rows, tapes in self._tapes.items())
        return torch.empty(num_bytes, dtype=torch.uint8)


def _tapes_of(model: CausalLM, context: ForwardContext) -> dict[bool, Tapes] | None:
    parts: dict[bool, Callable[..., Any]] = {False: model.forward}
    if model.ends_by_rows:
        parts[True] = model.up_to_last_attention
    try:
        return {by_rows: _tapes_of_part(part, context) for by_rows, part in parts.items()}
    except NotRecordable as reason:
        log.info("Steps of this model are not taped: %s.", reason)
        return None


def _tapes_of_part(part: Callable[..., Any], context: ForwardContext) -> Tapes:
    """The tapes of a function of (token ids, positions, context)."""

    def check(token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        with context.states.unchanged() if context.states is not None else nullcontext():
            return part(token_ids, positions, context)

    ids = positions = torch.zeros(1, dtype=torch.int64)
    return Tapes(lambda i, p: part(i, p, context), ids, positions, check=check)
