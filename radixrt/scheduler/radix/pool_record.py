"""Records which prefix each page of the KV pool holds, in memory that outlives the scheduler.

With a shared KV pool (``--shared-kv-pool``), the pages of a worker that is killed are still there;
the next scheduler builds its radix tree from this record. The record is a table with a row for each
page: the page before it, its tokens, and whether it is *complete*. Only complete rows count:

- A row becomes complete when the worker has answered the last step that was sent when the page
  entered the tree, or in whose plan it did. So its keys and values have been written.
- It is incomplete from the moment when the page leaves the tree, before a plan can give the page to
  a new owner.
- The pages of a running answer are not in the tree, but they are recorded as soon as they are full
  of known tokens, and until they are free again. So two pages may hold the same prefix. The next
  scheduler keeps one of them (:func:`radixrt.scheduler.radix.takeover.take_over`).

A row also names the kept state of recurrent layers behind its page, from the answer of the step
that has written the state until the state is dropped.

A process that is killed leaves everything that it has stored, in order, so no moment is a wrong one
to die. What else the tree knows (locks, leases, hints, the order of uses) is not recorded.
"""

import mmap
import os
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.key_ids import is_activated
from radixrt.scheduler.radix.page_allocator import NO_PAGES, Pages
from radixrt.scheduler.slot_table import SlotTable

ID_BYTES = 64
"""Of the id of the pool to which the record belongs, at its beginning."""
ROOT_BYTES = 512
"""Of the root in a row, with its length. Prefixes below longer ones are not recorded."""
NO_PAGE = -1
_ALIGNMENT = 64
_NOT_AWAITED, _NOT_SENT = -1, -2


class RecordedPrefix(NamedTuple):
    """A prefix of whole pages, none of which another prefix continues further."""

    root: CacheRoot
    tokens: TokenIds
    pages: Pages
    states: TokenIds
    """The row of the kept state behind each page; below 0: there is none."""


class PoolRecord:
    """The record of one KV pool, which is an observer of the tree.

    Args:
        memory: of :func:`record_bytes`; all zero if nothing was recorded yet.
        state_delay: steps after the one that has written a state whose answers mean that all ranks
            have. Keys and values are behind a sum over the ranks; states need not be.
    """

    def __init__(
        self,
        memory: "mmap.mmap | bytearray",
        num_pages: int,
        page_size: int,
        state_delay: int = 0,
    ) -> None:
        ends = _ends(num_pages, page_size)

        def column(number: int, dtype: type, width: int) -> np.ndarray:
            count = num_pages * width
            return np.frombuffer(memory, dtype, count, ends[number]).reshape(num_pages, width)

        self._is_complete = column(0, np.uint8, 1)[:, 0]
        self._before = column(1, np.int32, 1)[:, 0]
        self._number = column(2, np.int64, 1)[:, 0]
        """Grows from page to page that is recorded."""
        self._tokens = column(3, np.int32, page_size)
        self._roots = column(4, np.uint8, ROOT_BYTES)
        """Of pages that begin a prefix, packed, behind its length in two bytes."""
        self._states = column(5, np.int32, 1)[:, 0]
        """The row of the kept state behind each page, plus 1; 0: there is none."""
        self._page_size = page_size
        self._awaits = np.full(num_pages, _NOT_AWAITED, dtype=np.int64)
        """The step after which each page is complete."""
        self._entered: list[Pages] = []
        """Pages that were recorded since the last call of :meth:`sent`."""
        self._under_way: deque[tuple[int, Pages]] = deque()
        """Pages that become complete, with the step after which they do."""
        self._state_delay = state_delay
        self._states_under_way: dict[int, tuple[int, int]] = {}
        """By page: the step after whose answer a state is recorded, and its row."""
        self._last_done = _NOT_AWAITED
        self._next_number = int(self._number.max(initial=0)) + 1

    # ------------------------------------------------------------ the tree's changes

    def stored(
        self, root: CacheRoot | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        if previous_page is None:
            packed = (root or BASE_ROOT).packed()
            if len(packed) > ROOT_BYTES - 2:
                return
            row = len(packed).to_bytes(2, "little") + packed
            self._roots[pages[0], : len(row)] = np.frombuffer(row, np.uint8)
        self._before[pages[0]] = NO_PAGE if previous_page is None else previous_page
        self._before[pages[1:]] = pages[:-1]
        self._tokens[pages] = tokens.reshape(len(pages), self._page_size)
        self._number[pages] = np.arange(self._next_number, self._next_number + len(pages))
        self._next_number += len(pages)
        self._awaits[pages] = _NOT_SENT
        self._entered.append(pages)

    def removed(self, pages: Pages) -> None:
        """Pages have left the tree, or a sequence has given its own back."""
        self._is_complete[pages] = 0
        self._awaits[pages] = _NOT_AWAITED

    def filled(self, slots: SlotTable) -> None:
        """Record the pages that running sequences have filled with known tokens since the last
        call, and that are not in the tree.

        The steps that were sent compute them: a draft that is rejected, and a token that is not
        known yet, are in no position that counts as planned and known.
        """
        size = self._page_size
        start = np.maximum(slots.num_recorded_pages, slots.num_tree_pages)
        full = slots.planned // size
        for slot in np.flatnonzero(slots.in_use & (full > start)).tolist():
            sequence, first = slots.sequences[slot], int(start[slot])
            assert sequence is not None
            end = min(int(full[slot]), sequence.num_tokens // size)
            if first < end:
                before = int(slots.block_tables[slot, first - 1]) if first else None
                pages = slots.block_tables[slot, first:end].copy()
                tokens = sequence.tokens[first * size : end * size]
                self.stored(sequence.root, before, tokens, pages)
                slots.num_recorded_pages[slot] = end

    def sent(self, last_step: int) -> None:
        """The pages that were recorded meanwhile are complete after this step, the last that is
        sent to the worker.

        Call it after each plan, and after each result.
        """
        if not self._entered:
            return
        pages, self._entered = np.concatenate(self._entered), []
        pages = pages[self._awaits[pages] == _NOT_SENT]
        self._awaits[pages] = last_step
        self._under_way.append((last_step, pages))
        self.done(self._last_done)

    def done(self, step: int) -> None:
        """The worker has answered this step, and all before."""
        self._last_done = step
        while self._under_way and self._under_way[0][0] <= step:
            awaited, pages = self._under_way.popleft()
            pages = pages[self._awaits[pages] == awaited]
            self._awaits[pages] = _NOT_AWAITED
            self._is_complete[pages] = 1
        for page, (awaited, row) in list(self._states_under_way.items()):
            if awaited <= step:
                self._states[page] = row + 1
                del self._states_under_way[page]

    # ------------------------------------------------------------ changes of kept states

    def state_written(self, page: int, row: int, step: int) -> None:
        """A step that is answered has written the state behind a page."""
        self._states_under_way[page] = step + self._state_delay, row

    def state_dropped(self, page: int) -> None:
        """The row of this page's state may have another one now."""
        self._states_under_way.pop(page, None)
        self._states[page] = 0

    def state_moved(self, old: int, new: int) -> None:
        """The state behind a page belongs to another page of the same prefix now."""
        row, coming = self._states[old], self._states_under_way.get(old)
        self.state_dropped(old)
        self._states[new] = row
        if coming is not None:
            self._states_under_way[new] = coming

    # ------------------------------------------------------------ the next scheduler

    def take_prefixes(self) -> list[RecordedPrefix]:
        """The complete prefixes that a dead scheduler has left, the one that it recorded last at
        the end. Pages of different ones may hold the same prefix.

        All rows without one are incomplete from now on: a page whose prefix is not there would else
        belong to whatever has the place of that prefix one day. So are pages whose ids mean an
        adapter of the dead process.
        """
        children: dict[int, list[int]] = {}
        complete = np.flatnonzero(self._is_complete)
        for page, before in zip(complete.tolist(), self._before[complete].tolist(), strict=True):
            children.setdefault(before, []).append(page)
        found = [
            RecordedPrefix(root, self._tokens[pages].reshape(-1), pages, self._states[pages] - 1)
            for first in children.get(NO_PAGE, ())
            if (root := self._root_of(first)) is not None
            for pages in self._prefixes_from(first, children)
        ]
        self.keep_only(np.concatenate([NO_PAGES, *(prefix.pages for prefix in found)]))
        return sorted(found, key=lambda prefix: self._number[prefix.pages[-1]])

    def keep_only(self, pages: Pages) -> None:
        """All rows but those of these pages are incomplete from now on: [n]."""
        others = np.ones_like(self._is_complete)
        others[pages] = 0
        self._is_complete[others == 1] = 0
        self._states[others == 1] = 0

    def _prefixes_from(self, first: int, children: dict[int, list[int]]) -> Iterator[Pages]:
        """The longest prefixes that begin with a page."""
        open_ones: list[tuple[Pages, int]] = [(NO_PAGES, first)]
        while open_ones:
            before, page = open_ones.pop()
            run = [page]
            while len(following := children.get(run[-1], [])) == 1:
                run += following
            usable = next((n for n, one in enumerate(run) if self._is_activated(one)), len(run))
            if usable < len(run):
                run, following = run[:usable], []
            pages = np.concatenate((before, np.array(run, dtype=np.int32)))
            if not following and len(pages):
                yield pages
            open_ones += [(pages, child) for child in following]

    def _is_activated(self, page: int) -> bool:
        return is_activated(self._tokens[page].tobytes())

    def _root_of(self, page: int) -> CacheRoot | None:
        row = self._roots[page].tobytes()
        length = int.from_bytes(row[:2], "little")
        parts, at = list[str](), 2
        while at < 2 + length:
            size = int.from_bytes(row[at : at + 4], "little")
            parts.append(row[at + 4 : at + 4 + size].decode("utf-8", "surrogatepass"))
            at += 4 + size
        return CacheRoot(*parts) if len(parts) == len(BASE_ROOT) else None


def record_bytes(num_pages: int, page_size: int) -> int:
    """The size of a record. Rows of pages that begin no prefix take no memory for a root."""
    return _ends(num_pages, page_size)[-1]


def _ends(num_pages: int, page_size: int) -> list[int]:
    """Where the columns begin and end, each at a multiple of 64 bytes."""
    ends = [ID_BYTES]
    for row_bytes in (1, 4, 8, 4 * page_size, ROOT_BYTES, 4):
        ends.append(ends[-1] + -(-num_pages * row_bytes // _ALIGNMENT) * _ALIGNMENT)
    return ends


def open_record(
    fd: int, pool_id: str, num_pages: int, page_size: int, num_ranks: int = 1
) -> PoolRecord | None:
    """The record of a pool in memory that the supervisor holds; None: there is no such memory, or
    the pool is not shared.

    Args:
        fd: of the memory; below 0: there is none.
        pool_id: of the worker's pool; "": it is not shared. A record of another pool is emptied.
    """
    if fd < 0:
        return None
    if not pool_id:
        os.close(fd)
        return None
    size, name = record_bytes(num_pages, page_size), pool_id.encode().ljust(ID_BYTES, b"\0")
    is_same = os.fstat(fd).st_size == size and os.pread(fd, ID_BYTES, 0) == name
    if not is_same:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, size)
    memory = mmap.mmap(fd, size)
    memory[:ID_BYTES] = name
    os.close(fd)
    return PoolRecord(memory, num_pages, page_size, state_delay=int(num_ranks > 1))
