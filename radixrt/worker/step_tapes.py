"""Steps on the CPU as tapes: what is computed again and again for a number of tokens is repeated without the model's Python."""

import logging
from collections import OrderedDict

import torch

from radixrt.attention.backend import ForwardContext
from radixrt.models.decoder import CausalLM
from radixrt_kernels import tape

log = logging.getLogger(__name__)

MOST_TOKENS = 256
"""In larger steps the Python between the kernels is lost in their time."""

MOST_TAPES = 64
"""The least recently used one goes first. A tape takes about a megabyte, and some kilobytes a token."""


class StepTapes:
    """One tape a number of tokens, from token ids to hidden states. It is recorded when that number comes a second time.

    The backend of ``context`` must call its kernels by ``radixrt_kernels.tape``.
    """

    def __init__(self, model: CausalLM, context: ForwardContext) -> None:
        self._model = model
        self._context = context
        self._tapes: OrderedDict[int, tape.Tape | None] = OrderedDict()
        self._recordable = True

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the model's ``forward`` computes; overwritten by the next step."""
        count = len(token_ids)
        if count > MOST_TOKENS or not self._recordable:
            return self._compute(token_ids, positions)
        known = count in self._tapes
        taped = self._tapes.setdefault(count, None)
        self._tapes.move_to_end(count)
        if len(self._tapes) > MOST_TAPES:
            self._tapes.popitem(last=False)
        if taped is None:
            if not known:
                return self._compute(token_ids, positions)
            taped = self._record(token_ids, positions)
        return (
            self._compute(token_ids, positions)
            if taped is None
            else taped.replay(token_ids, positions)
        )

    def _compute(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._model.forward(token_ids, positions, self._context)

    def _record(self, token_ids: torch.Tensor, positions: torch.Tensor) -> tape.Tape | None:
        try:
            taped = tape.record(self._compute, token_ids, positions)
        except tape.NotRecordable as reason:
            log.info("Steps of this model are not taped: %s.", reason)
            self._recordable = False
            return None
        self._tapes[len(token_ids)] = taped
        return taped
