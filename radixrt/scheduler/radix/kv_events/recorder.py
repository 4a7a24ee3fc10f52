"""Turns the changes of the radix tree into events with block hashes; keeps the hash of every cached
page."""

from typing import NamedTuple

import numpy as np

from radixrt.kv.block_hash import block_hashes, namespace_hash
from radixrt.kv.events import AllBlocks, AllBlocksCleared, BlockRemoved, BlockStored
from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.page_allocator import Pages

_ABSENT, _PLAIN, _SALTED = 0, 1, 2


class _Stored(NamedTuple):
    """The arguments of :meth:`EventRecorder.stored`."""

    salt: str | None
    previous_page: int | None
    tokens: TokenIds
    pages: Pages


class EventRecorder:
    """The tree's observer. It notes the changes, and computes hashes when the events are taken,
    while the worker computes its next step.

    Args:
        num_pages: of the KV pool.
        with_token_ids: whether the events contain the blocks' token ids.
    """

    def __init__(self, num_pages: int, page_size: int, *, with_token_ids: bool) -> None:
        self._page_size = page_size
        self._with_token_ids = with_token_ids
        self._changes: list[_Stored | Pages] = []
        self._hashes = np.zeros(num_pages, dtype=np.uint64)  # 8 bytes each, never used as numbers
        self._state = np.full(num_pages, _ABSENT, dtype=np.uint8)
        self._num_cached = 0

    def stored(
        self, salt: str | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        self._changes.append(_Stored(salt, previous_page, tokens, pages))

    def removed(self, pages: Pages) -> None:
        self._changes.append(pages)

    def take_events(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """The events since the last call, in order."""
        changes, self._changes = self._changes, []
        return [
            self._store(change) if isinstance(change, _Stored) else self._remove(change)
            for change in changes
        ]

    def snapshot(self) -> AllBlocks:
        """All blocks of the tree, as of the last events taken."""
        cached = self._hashes[self._state != _ABSENT]
        return AllBlocks(block_hashes=cached.tobytes(), page_size=self._page_size)

    def _store(self, change: _Stored) -> BlockStored:
        previous, packed = change.previous_page, change.tokens.tobytes()
        if previous is None:
            parent, before = None, namespace_hash(change.salt or "")
            state = _SALTED if change.salt else _PLAIN
        else:
            parent = before = self._hashes[previous].tobytes()
            state = int(self._state[previous])
        hashes = block_hashes(before, packed, self._page_size)
        self._hashes[change.pages] = np.frombuffer(hashes, dtype=np.uint64)
        self._state[change.pages] = state
        self._num_cached += len(change.pages)
        return BlockStored(
            block_hashes=hashes,
            parent_hash=parent,
            token_ids=packed if self._with_token_ids else None,
            page_size=self._page_size,
            salted=state == _SALTED,
        )

    def _remove(self, pages: Pages) -> BlockRemoved | AllBlocksCleared:
        self._state[pages] = _ABSENT
        self._num_cached -= len(pages)
        if self._num_cached == 0:
            return AllBlocksCleared()  # the same in fewer bytes
        return BlockRemoved(block_hashes=self._hashes[pages].tobytes())
