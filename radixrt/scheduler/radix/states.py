"""Owns the kept states of recurrent layers: the row of the worker's tables that holds the state
behind a page.

A page is in the tree at most once, so its id names the whole prefix that ends with it. A state
therefore belongs to the page at whose end it is: splits and joins of edges change nothing, and a
page that is freed takes its state along. The state of a page that a sequence still owns becomes
usable when the page enters the tree.

Rows are given away like pages: a row that is free now may be written again by the very next plan,
although a step in flight still reads or writes it, because steps run in order.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import islice

import numpy as np

from radixrt.messages.ids import TokenIds
from radixrt.messages.steps import EMPTY_STATE
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.radix.pool_record import PoolRecord

NO_ROW = -1

CANDIDATES = 8
"""Of the states that were used least recently, so many are compared when one has to go."""


@dataclass(slots=True)
class _Kept:
    """One state."""

    page: int
    saves: int
    """Tokens between the next state before it and its own position: those that its loss costs a
    request."""
    step: int
    """The step whose plan orders it."""
    ready_from: float
    """The step from which on it may be read; infinity: the worker has not confirmed it."""
    pins: int = 0
    """Leases that hold it."""


class KeptStates:
    """The states behind pages, and the free rows.

    >>> states = KeptStates(num_rows=2, num_pages=8)
    >>> states.begin_plan(step=0)
    >>> row = states.keep(page=5, saves=32)
    >>> states.nearest(np.array([7, 5, 3])), states.is_coming(np.array([7, 5, 3]), 0)
    ((0, -1), True)
    >>> states.begin_plan(step=1)
    >>> states.nearest(np.array([7, 5, 3])) == (2, row)
    True

    Args:
        num_rows: states that the worker keeps; 0: the model has none, or no prefix is shared.
    """

    def __init__(self, num_rows: int, num_pages: int) -> None:
        self.num_rows = num_rows
        self._row_of = np.full(num_pages, NO_ROW, dtype=np.int32)
        """The row of the state behind each page."""
        self.is_kept = np.zeros(num_pages, dtype=np.bool_)
        """Whether each page has a state that may be read, at the latest from the next plan on."""
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        """The states by row, the one used least recently first."""
        self._free = list(range(num_rows - 1, -1, -1))
        self.num_lent = 0
        """Rows that are filled from disk."""
        self._step = 0
        self.record: PoolRecord | None = None
        """Of a shared pool, where states outlive the process."""
        self._settling: deque[tuple[int, int, _Kept]] = deque()
        """States that are dropped unless a step up to the first number writes them; each with its
        row."""

    def __bool__(self) -> bool:
        return self.num_rows > 0

    def __len__(self) -> int:
        return len(self._kept)

    def begin_plan(self, step: int, num_in_flight: int = 0) -> None:
        """Begin the plan of this step. What the steps before it keep may be read now.

        Args:
            num_in_flight: steps before it whose results are not known.
        """
        self._step = step
        while self._settling and self._settling[0][0] < step - num_in_flight:
            _, row, kept = self._settling.popleft()
            if self._kept.get(row) is kept and kept.ready_from == math.inf:
                self.drop_of(kept.page)

    def nearest(self, pages: Pages) -> tuple[int, int]:
        """The longest prefix of these pages whose state may be read: its pages, and the row.

        Args:
            pages: of a prefix, in order of position.
        """
        for count in self._with_state(pages):
            row = int(self._row_of[pages[count - 1]])
            if self._kept[row].ready_from <= self._step:
                return count, row
        return 0, EMPTY_STATE

    def is_coming(self, pages: Pages, beyond: int) -> bool:
        """Whether the plan in the making keeps the state of a prefix of these pages that is longer
        than ``beyond`` pages."""
        for count in self._with_state(pages):
            if count <= beyond:
                return False
            if self._step < self._kept[int(self._row_of[pages[count - 1]])].ready_from < math.inf:
                return True
        return False

    def _with_state(self, pages: Pages) -> list[int]:
        """The lengths of the prefixes, in pages, that have a state, the longest first."""
        return (1 + np.flatnonzero(self._row_of[pages] != NO_ROW)[::-1]).tolist()

    def has(self, page: int) -> bool:
        """Whether the state behind a page is kept, or about to be."""
        return bool(self._row_of[page] != NO_ROW)

    def count(self, pages: Pages) -> int:
        """Number of these pages whose state may be read."""
        return int(np.count_nonzero(self.is_kept[pages]))

    def use(self, row: int) -> None:
        """A sequence starts from this state now."""
        self._kept.move_to_end(row)

    def pin(self, pages: Pages) -> int:
        """Keep the state of the longest prefix of these pages that has one until :meth:`unpin`;
        returns its row, which is negative if there is none."""
        _, row = self.nearest(pages)
        if row >= 0:
            self._kept[row].pins += 1
        return row

    def unpin(self, row: int) -> None:
        """End one pin of a state."""
        self._kept[row].pins -= 1

    def keep(self, page: int, saves: int, *, is_certain: bool = True) -> int | None:
        """A row for the state behind a page, which the plan in the making writes.

        Args:
            is_certain: False: the worker may pass the position unseen; it says when the state is
                there (:meth:`confirm`).

        Returns:
            None: this plan writes all rows already.
        """
        assert not self.has(page), "the page has a state already"
        if not self._free and not self._drop_one():
            return None
        row = self._free.pop()
        self._row_of[page] = row
        self._kept[row] = _Kept(page, saves, self._step, self._step + 1 if is_certain else math.inf)
        self.is_kept[page] = is_certain
        return row

    def settle(self, page: int) -> None:
        """The worker is past the position of this page's state, or its slot is released: the state
        is dropped if none of the steps in flight has written it."""
        row = int(self._row_of[page])
        if row != NO_ROW and self._kept[row].ready_from == math.inf:
            self._settling.append((self._step, row, self._kept[row]))

    def _drop_one(self) -> bool:
        """Drop the state that saves least of those used least recently; False: all are new."""
        readable = (
            kept for kept in self._kept.values() if kept.ready_from <= self._step and not kept.pins
        )
        least = min(islice(readable, CANDIDATES), key=lambda kept: kept.saves, default=None)
        if least is None:
            return False
        self.drop_of(least.page)
        return True

    def confirm(self, row: int, step: int) -> None:
        """The worker has written this row in a step. It is ignored if the state was dropped
        meanwhile, also if the row has another one by now."""
        kept = self._kept.get(row)
        if kept is None or kept.step > step:
            return
        if kept.ready_from == math.inf:
            kept.ready_from = step + 1
            self.is_kept[kept.page] = True
            self.use(row)
        if self.record is not None:
            self.record.state_written(kept.page, row, step)

    def adopt(self, pages: Pages, rows: TokenIds, page_size: int) -> None:
        """Take the states that a dead process has left behind the pages of a prefix: [n] each.

        Args:
            rows: below 0: the page has none.
        """
        start = 0
        for index in np.flatnonzero(rows >= 0).tolist():
            page, row = int(pages[index]), int(rows[index])
            if not self.has(page):
                self._row_of[page] = row
                self.is_kept[page] = True
                self._kept[row] = _Kept(page, (index + 1 - start) * page_size, -1, -1)
                self._free.remove(row)
            start = index + 1

    def drop_of(self, page: int) -> None:
        """Drop the state behind a page, if there is one."""
        row = int(self._row_of[page])
        if row != NO_ROW:
            self._row_of[page] = NO_ROW
            self.is_kept[page] = False
            del self._kept[row]
            self._free.append(row)
            if self.record is not None:
                self.record.state_dropped(page)

    def drop(self, pages: Pages) -> None:
        """The pages are free now: [n]."""
        for page in pages[self._row_of[pages] != NO_ROW].tolist():
            self.drop_of(page)

    def move(self, old: Pages, new: Pages) -> None:
        """Let the states behind ``old`` belong to ``new``, pages of the same prefixes, unless these
        have their own: [n] each."""
        for index in np.flatnonzero(self._row_of[old] != NO_ROW).tolist():
            before, page = int(old[index]), int(new[index])
            if not self.has(page):
                row = int(self._row_of[before])
                self._row_of[before], self._row_of[page] = NO_ROW, row
                self.is_kept[page], self.is_kept[before] = self.is_kept[before], False
                self._kept[row].page = page
                if self.record is not None:
                    self.record.state_moved(before, page)

    # ------------------------------------------------------------ states on disk

    def readable_row(self, page: int) -> int:
        """The row of the state behind a page that the steps that were sent have written; NO_ROW:
        there is none."""
        row = int(self._row_of[page])
        return row if row != NO_ROW and self._kept[row].ready_from <= self._step else NO_ROW

    def lend(self) -> int:
        """A row that is filled from disk, until :meth:`end_loan`; NO_ROW: none is to be had."""
        if not self._free and not self._drop_one():
            return NO_ROW
        self.num_lent += 1
        return self._free.pop()

    def end_loan(self, row: int, pages: Pages, page_size: int) -> None:
        """A row that was lent has the state behind the last of these pages of a prefix; no pages:
        it has none."""
        self.num_lent -= 1
        self._free.append(row)
        if len(pages):
            rows = np.full(len(pages), NO_ROW)
            rows[-1] = row
            self.adopt(pages, rows, page_size)
            if self.record is not None and self._row_of[pages[-1]] == row:
                self.record.state_written(int(pages[-1]), row, self._step)

    # ------------------------------------------------------------ inspection

    def pages(self) -> dict[int, int]:
        """The page of each row in use, for checks of invariants."""
        return {row: kept.page for row, kept in self._kept.items()}

    def readable_pages(self) -> set[int]:
        """The pages of the states that may be read, at the latest from the next plan on; for checks
        of invariants."""
        return {kept.page for kept in self._kept.values() if kept.ready_from < math.inf}

    @property
    def num_free(self) -> int:
        return len(self._free)
