"""Computes a draft head over the pages of sequences.

The KV of the head at position p is computed from token p and the model's state behind position p -
1. So it depends on no token behind p, and belongs to a cached prefix as the model's own KV does:
one more layer of the same pages. Position 0 has no entry. EAGLE counts its positions from the
second token on, and so do the rotations here. Attention kernels would read the empty place of
position 0, so they see these pages as pages of one token each, without that place.

A sequence that goes on from a cached prefix needs the state behind the last token of that, which
other sequences have computed. Prefixes end with pages, so each page keeps the state behind its last
token.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.attention.backend import AttentionBackend, ForwardContext
from radixrt.attention.kv_spec import CachedTensor, KVSpec, LayerKV
from radixrt.attention.metadata import AttentionMetadata
from radixrt.models.draft_head import DraftHead
from radixrt.worker.batch import PersistentBatch
from radixrt_kernels.tape import Tape, Tapes
from radixrt_kernels.trace import NotRecordable

log = logging.getLogger(__name__)

MAX_TAPED = 64
"""Rows of a computation that is taped."""

MAX_SPARE = 8
"""Of those, rows of which only keys and values are used: a tape computes all of the layer."""


class Span(NamedTuple):
    """Consecutive positions of a slot."""

    slot: int
    start: int
    """At least 1."""
    end: int


def head_specs(head: DraftHead, page_size: int, kv_dtype: torch.dtype) -> list[KVSpec]:
    """What pages hold for a head: its keys and values, and of each page the state behind its last
    token, spread over its tokens."""
    size, dtype = head.hidden_size, head.norm.weight.dtype
    state = KVSpec((CachedTensor((1, -(-size // page_size)), dtype),))
    return [head.attention.kv_spec(kv_dtype), state]


class HeadPages:
    """A head, and the parts of the pages that are its own.

    Args:
        backend: for pages of one token.
        caches: those of :func:`head_specs`.
        batch: whose block tables are used.
        taped: small computations may be repeated from tapes.
    """

    def __init__(
        self,
        head: DraftHead,
        backend: AttentionBackend,
        caches: Sequence[LayerKV],
        batch: PersistentBatch,
        *,
        taped: bool,
    ) -> None:
        own, (states,) = caches
        self.head = head
        self._batch = batch
        self._backend = backend
        self._states = states.view(len(states), -1)  # [num_pages, page_size * width]
        kv = tuple(cache.view(-1, 1, *cache.shape[2:]) for cache in own)
        self._context = ForwardContext(backend, [kv])
        self._offsets = np.arange(batch.page_size, dtype=np.int32)
        self._tapes = self._make_tapes() if taped else None
        self._tape_of = functools.lru_cache(MAX_TAPED)(self._make_tape)

    # ------------------------------------------------------------ states at the ends of pages

    def keep_ends(self, slot: int, start: int, states: Tensor) -> None:
        """Keep those of the states [n, hidden_size] behind the positions from ``start`` on that
        stand behind whole pages."""
        size = self._batch.page_size
        first = -(start + 1) % size
        if first >= len(states):
            return
        ends = states[first::size]
        pages = self._batch.block_tables[slot, (start + first) // size :][: len(ends)]
        self._states[torch.from_numpy(pages.astype(np.int64)), : states.shape[1]] = ends

    def state_before(self, slot: int, position: int) -> Tensor | None:
        """The state [1, hidden_size] behind the token before a position; None: no page ends
        there."""
        if position % self._batch.page_size:
            return None
        page = int(self._batch.block_tables[slot, position // self._batch.page_size - 1])
        return self._states[page : page + 1, : self.head.hidden_size].clone()

    # ------------------------------------------------------------ the head

    def keep(self, spans: Sequence[Span], token_ids: Sequence[int], states: Tensor) -> None:
        """As :meth:`compute`, for what the pages hold alone."""
        inputs = self._plan(spans, token_ids, states, attends=False)
        self.head.forward(*inputs, self._context, torch.empty(0, dtype=torch.int64))

    def compute(
        self, spans: Sequence[Span], token_ids: Sequence[int], states: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the head at some positions of some slots.

        Args:
            token_ids: those at the positions, of one span after the other.
            states: [positions, hidden_size] behind the positions before. They may be overwritten.

        Returns:
            see ``DraftHead.forward``, at the last position of each span.
        """
        inputs = self._plan(spans, token_ids, states, attends=True)
        last = torch.tensor([span.end - span.start for span in spans]).cumsum(0) - 1
        spare = len(states) - len(spans)
        if not self._tapes or len(states) > MAX_TAPED or spare > MAX_SPARE:
            return self.head.forward(*inputs, self._context, last)
        hidden, following = self._tape_of(len(states)).replay(*inputs)
        return hidden[last], following[last]

    def _plan(
        self, spans: Sequence[Span], token_ids: Sequence[int], states: Tensor, *, attends: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Plan the attention, and return the inputs of the head: tokens, positions and states.

        Args:
            attends: the last position of each span attends to those before. The others, of which
                only keys and values are used, attend to themselves, which costs nothing.
        """
        read, written, counts = [], [], []
        for span in spans:
            every = self._locations(span)
            own = every[span.start - 1 :]
            read += [own[:-1], every] if attends else [own]
            counts += [1] * (len(own) - 1) + [len(every) if attends else 1]
            written.append(own)
        self._backend.plan(
            AttentionMetadata(
                qo_indptr_cpu=torch.arange(len(states) + 1, dtype=torch.int32),
                kv_indptr_cpu=torch.from_numpy(_indptr(np.array(counts))),
                last_page_len_cpu=torch.ones(len(states), dtype=torch.int32),
                kv_indices=torch.from_numpy(np.concatenate(read)),
                kv_locations=torch.from_numpy(np.concatenate(written).astype(np.int64)),
                page_size=1,
            )
        )
        positions = np.concatenate([np.arange(span.start - 1, span.end - 1) for span in spans])
        self.head.prepare_positions(int(positions.max()) + 1)
        return torch.tensor(token_ids), torch.from_numpy(positions), states

    def _locations(self, span: Span) -> NDArray[np.int32]:
        """Places of the positions from 1 to the end of a span, in tokens of the pool."""
        size = self._batch.page_size
        pages = self._batch.block_tables[span.slot, : -(-span.end // size)]
        return (pages[:, None] * np.int32(size) + self._offsets).reshape(-1)[1 : span.end]

    def _forward(self, token_ids: Tensor, positions: Tensor, states: Tensor) -> tuple[Tensor, ...]:
        return self.head.forward(token_ids, positions, states, self._context)

    def _forward_of_copy(self, token_ids: Tensor, positions: Tensor, states: Tensor) -> Any:
        return self._forward(token_ids, positions, states.clone())

    def _make_tapes(self) -> Tapes | None:
        zero = torch.zeros(1, dtype=torch.int64)
        state = torch.zeros(1, self.head.hidden_size, dtype=self._states.dtype)
        try:
            return Tapes(self._forward, zero, zero, state, check=self._forward_of_copy)
        except NotRecordable as reason:
            log.info("The draft head is not taped: %s.", reason)
            return None

    def _make_tape(self, rows: int) -> Tape:
        assert self._tapes is not None
        return self._tapes.of(rows, self._memory)

    @functools.cached_property
    def _memory(self) -> Tensor:
        assert self._tapes is not None
        return torch.empty(self._tapes.num_bytes(MAX_TAPED), dtype=torch.uint8)


def _indptr(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
