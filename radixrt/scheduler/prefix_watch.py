"""Whose cached prefix may have become longer?

A waiting sequence's prefix ends where the tree lacks its next page. It can only grow when somebody inserts
exactly that page, so sequences are kept by the page they lack: an insertion finds those it concerns with a
lookup a page, however many wait, and puts them aside as a whole. They are looked up anew a few at a time.

The page lacked is the one noted when the sequence was looked up last. Eviction may have shortened its prefix since, and
is not told of; then an insertion brings back the evicted pages too, and the noted one is not its first.
"""

from collections import Counter, deque
from collections.abc import Callable

MissingPage = tuple[str, int, bytes]
"""Cache salt, number of pages before it, and its token ids as bytes. Equal pages at one depth below different
prefixes are not told apart: that costs a lookup in vain."""


class PrefixWatch:
    """Sequence ids by the page they lack."""

    def __init__(self) -> None:
        self._lacking: dict[MissingPage, set[int]] = {}
        self._depths: Counter[tuple[str, int]] = Counter()
        """How many of the pages lacked have so many pages before them, by cache salt: an insertion needs no look at
        depths where nobody lacks any."""
        self._outdated: deque[set[int]] = deque()

    def add(self, seq_id: int, page: MissingPage) -> None:
        if page not in self._lacking:
            self._lacking[page] = set()
            self._depths[page[:2]] += 1
        self._lacking[page].add(seq_id)

    def discard(self, seq_id: int, page: MissingPage) -> None:
        """Forget a sequence; if it is put aside already, it will still be taken."""
        lacking = self._lacking.get(page)
        if lacking is not None:
            lacking.discard(seq_id)
            if not lacking:
                self._forget(page)

    def inserted(self, salt: str, start: int, end: int, page: Callable[[int], bytes]) -> None:
        """The tree has got the pages of one prompt from ``start`` to ``end``: put everyone aside who lacked one.

        Args:
            page: token ids of the page with so many pages before it.
        """
        for depth in range(start, end):
            if (salt, depth) in self._depths:
                missing = (salt, depth, page(depth))
                if missing in self._lacking:
                    self._outdated.append(self._forget(missing))

    def _forget(self, page: MissingPage) -> set[int]:
        self._depths[page[:2]] -= 1
        if not self._depths[page[:2]]:
            del self._depths[page[:2]]
        return self._lacking.pop(page)

    def take_outdated(self) -> int | None:
        """One sequence id that was put aside; None if there is none left."""
        if not self._outdated:
            return None
        seq_id = self._outdated[0].pop()
        if not self._outdated[0]:
            self._outdated.popleft()
        return seq_id
