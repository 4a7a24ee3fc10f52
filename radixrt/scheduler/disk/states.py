"""The states of recurrent layers on disk: which are to be written, and how they are named there.

A state is written in parts of the size of a page, each in a slot of its own. So the file, the index,
the journal, the quota and the checksums are those of pages. The parts of the state behind a prefix
are named as the pages of a prompt of zeros below a root that no other prefix has.
"""

import hashlib
from collections import deque
from collections.abc import Iterator

from radixrt.scheduler.disk.index import PageName, page_names
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.radix.states import NO_ROW, KeptStates


class DiskStates:
    """The kept states that are to be written.

    Args:
        num_parts: of a state.
    """

    def __init__(self, kept: KeptStates, num_parts: int) -> None:
        self.num_parts = num_parts
        self._kept = kept
        self._wanted: deque[tuple[int, PageName]] = deque()
        """Pages in memory, and their names."""
        self._leaving: list[tuple[int, PageName]] = []
        """The rows of states whose pages left memory in the plan in the making."""

    def parts(self, name: PageName) -> Iterator[PageName]:
        """The names of the parts of the state behind a page. Each takes a digest: where the first
        is missing, do not ask for the others."""
        zeros = bytes(self.num_parts * len(name.tokens))
        root = hashlib.sha256(b"state" + name.digest).digest()
        return page_names(root, name.depth + 1, zeros, len(name.tokens))

    def of_prefix(self, pages: Pages) -> int | None:
        """The index of the page behind which is the state from which a prefix goes on: [n]."""
        count, row = self._kept.nearest(pages)
        return None if row < 0 else count - 1

    def want(self, page: int, name: PageName) -> None:
        """The state behind a page is to be written."""
        self._wanted.append((page, name))

    def leaves(self, page: int, name: PageName) -> None:
        """A page leaves memory, and the state behind it."""
        if (row := self._kept.readable_row(page)) != NO_ROW:
            self._leaving.append((row, name))

    def take_leaving(self) -> list[tuple[int, PageName]]:
        """The rows of the states that leave memory, whose next owners may write to them soon."""
        leaving, self._leaving = self._leaving, []
        return leaving

    def wanted(self) -> Iterator[tuple[int, int, PageName]]:
        """The pages of the states that are to be written, their rows and names; each is taken off
        when the next one is asked for."""
        while self._wanted:
            page, name = self._wanted[0]
            if (row := self._kept.readable_row(page)) != NO_ROW:
                yield page, row, name
            self._wanted.popleft()

    def clear(self) -> None:
        self._wanted.clear()
        self._leaving.clear()
