"""Whose cached prefix may have become longer?

A waiting sequence's prefix ends where the tree lacks its next page. It can only grow when somebody inserts exactly that
page, so sequences are kept by the page they lack: an insertion finds those it concerns by looking for
its pages, however many wait, and puts them aside as a whole. They are looked up anew a few at a time.

An eviction may have shortened a prefix since it was looked up. The insertion that makes it longer than ever begins
before the page that is known to be missing, so not only the first page of an insertion counts.
"""

from collections import deque

MissingPage = tuple[str, int, bytes]
"""Cache salt, number of pages before it, and its token ids as bytes. Equal pages at one depth below different
prefixes are not told apart: that costs a lookup in vain."""


class PrefixWatch:
    """Sequence ids by the page they lack."""

    def __init__(self) -> None:
        self._lacking: dict[int, dict[tuple[str, bytes], set[int]]] = {}
        """By the number of pages before the one they lack, and then by the page itself."""
        self._outdated: deque[set[int]] = deque()

    def add(self, seq_id: int, page: MissingPage) -> None:
        salt, depth, packed = page
        self._lacking.setdefault(depth, {}).setdefault((salt, packed), set()).add(seq_id)

    def discard(self, seq_id: int, page: MissingPage) -> None:
        """Forget a sequence; if it is put aside already, it will still be taken."""
        salt, depth, packed = page
        lacking = self._lacking.get(depth, {}).get((salt, packed))
        if lacking is not None:
            lacking.discard(seq_id)
            if not lacking:
                self._forget(depth, (salt, packed))

    def inserted(self, salt: str, depth: int, packed: bytes, page_bytes: int) -> None:
        """The tree has got pages: put everyone aside who lacked one of them.

        Args:
            depth: number of pages before them.
            packed: their token ids.
            page_bytes: length of one page in ``packed``.
        """
        end = depth + len(packed) // page_bytes
        for place in self._depths_between(depth, end):
            start = (place - depth) * page_bytes
            page = salt, packed[start : start + page_bytes]
            lacking = self._lacking[place].get(page)
            if lacking is not None:
                self._outdated.append(lacking)
                self._forget(place, page)

    def _depths_between(self, start: int, end: int) -> list[int]:
        """Of these depths, the ones at which somebody lacks a page."""
        if end - start < len(self._lacking):
            return [depth for depth in range(start, end) if depth in self._lacking]
        return [depth for depth in self._lacking if start <= depth < end]

    def _forget(self, depth: int, page: tuple[str, bytes]) -> None:
        del self._lacking[depth][page]
        if not self._lacking[depth]:
            del self._lacking[depth]

    def take_outdated(self) -> int | None:
        """One sequence id that was put aside; None if there is none left."""
        if not self._outdated:
            return None
        seq_id = self._outdated[0].pop()
        if not self._outdated[0]:
            self._outdated.popleft()
        return seq_id
