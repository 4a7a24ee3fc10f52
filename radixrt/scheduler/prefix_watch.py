"""Whose cached prefix may have become longer?

A waiting sequence's prefix ends where the tree lacks its next page. It can only grow when somebody inserts
exactly that page, so sequences are kept by the page they lack: an insertion finds those it concerns with one
lookup, however many wait, and puts them aside as a whole. They are looked up anew a few at a time.
"""

from collections import deque

MissingPage = tuple[str, int, bytes]
"""Cache salt, number of pages before it, and its token ids as bytes. Equal pages at one depth below different
prefixes are not told apart: that costs a lookup in vain."""


class PrefixWatch:
    """Sequence ids by the page they lack."""

    def __init__(self) -> None:
        self._lacking: dict[MissingPage, set[int]] = {}
        self._outdated: deque[set[int]] = deque()

    def add(self, seq_id: int, page: MissingPage) -> None:
        self._lacking.setdefault(page, set()).add(seq_id)

    def discard(self, seq_id: int, page: MissingPage) -> None:
        """Forget a sequence; if it is put aside already, it will still be taken."""
        lacking = self._lacking.get(page)
        if lacking is not None:
            lacking.discard(seq_id)
            if not lacking:
                del self._lacking[page]

    def inserted(self, page: MissingPage) -> None:
        """The tree has got a page: put everyone aside who lacked it."""
        lacking = self._lacking.pop(page, None)
        if lacking is not None:
            self._outdated.append(lacking)

    def take_outdated(self) -> int | None:
        """One sequence id that was put aside; None if there is none left."""
        if not self._outdated:
            return None
        seq_id = self._outdated[0].pop()
        if not self._outdated[0]:
            self._outdated.popleft()
        return seq_id
