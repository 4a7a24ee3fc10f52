"""Finds the waiting sequences whose cached prefix may have become longer.

A waiting sequence's prefix ends where the tree lacks its next page. The prefix can only grow when
exactly that page is inserted. So sequences are indexed by the page they lack, and an insertion
looks up its pages, however many sequences wait. The sequences it finds are set aside, to be looked
up again a few at a time.

An eviction may have shortened a prefix since its lookup. The insertion that makes it longer than
ever then begins before the page noted as lacking, so not only the first page of an insertion
counts.
"""

from collections import deque

from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds

MissingPage = tuple[CacheRoot, int, bytes]
"""Cache root, number of pages before it, and its packed token ids. Equal pages at one depth below
different prefixes are not told apart; the cost is an unnecessary lookup."""


class PrefixWatch:
    """Sequence ids by the page they lack."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._lacking: dict[int, dict[tuple[CacheRoot, bytes], set[int]]] = {}
        """The sequences that lack a page, by the number of pages before it, and then by root and
        page."""
        self._outdated: deque[set[int]] = deque()

    def add(self, seq_id: int, page: MissingPage) -> None:
        root, depth, packed = page
        self._lacking.setdefault(depth, {}).setdefault((root, packed), set()).add(seq_id)

    def discard(self, seq_id: int, page: MissingPage) -> None:
        """Forget a sequence. One that is set aside is still taken."""
        root, depth, packed = page
        lacking = self._lacking.get(depth, {}).get((root, packed))
        if lacking is not None:
            lacking.discard(seq_id)
            if not lacking:
                self._forget(depth, (root, packed))

    def inserted(self, root: CacheRoot, depth: int, tokens: TokenIds) -> None:
        """Set aside all sequences that lacked one of the pages just inserted.

        Args:
            depth: number of pages before them.
            tokens: of the pages.
        """
        size = self._page_size
        for place in self._depths_between(depth, depth + len(tokens) // size):
            start = (place - depth) * size
            page = root, tokens[start : start + size].tobytes()
            lacking = self._lacking[place].get(page)
            if lacking is not None:
                self._outdated.append(lacking)
                self._forget(place, page)

    def _depths_between(self, start: int, end: int) -> list[int]:
        """The depths of this range at which sequences lack a page."""
        if end - start < len(self._lacking):
            return [depth for depth in range(start, end) if depth in self._lacking]
        return [depth for depth in self._lacking if start <= depth < end]

    def _forget(self, depth: int, page: tuple[CacheRoot, bytes]) -> None:
        del self._lacking[depth][page]
        if not self._lacking[depth]:
            del self._lacking[depth]

    def take_outdated(self) -> int | None:
        """One of the sequence ids set aside; None if there is none."""
        if not self._outdated:
            return None
        seq_id = self._outdated[0].pop()
        if not self._outdated[0]:
            self._outdated.popleft()
        return seq_id
