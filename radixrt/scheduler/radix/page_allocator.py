"""Allocates the pages of the KV pool."""

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]

NO_PAGES: Pages = np.empty(0, dtype=np.int32)


class PageAllocator:
    """A stack of free page ids. Pages freed last are allocated first, while they may still be in
    the processor's cache.

    >>> allocator = PageAllocator(num_pages=4)
    >>> pages = allocator.allocate(3)
    >>> pages.tolist(), allocator.num_free
    ([2, 1, 0], 1)
    >>> allocator.free(pages[:2])
    >>> allocator.num_free
    3
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack: Pages = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> Pages:
        """Take ``count`` page ids: [count], int32. There must be as many free."""
        assert 0 <= count <= self._num_free, f"asked for {count} of {self._num_free} free pages"
        self._num_free -= count
        return self._stack[self._num_free : self._num_free + count].copy()

    def free(self, pages: Pages) -> None:
        """Return pages: [count], int32."""
        end = self._num_free + len(pages)
        assert end <= self.num_pages, "a page was freed twice"
        self._stack[self._num_free : end] = pages
        self._num_free = end

    def take(self, pages: Pages) -> None:
        """Take these pages: [count], int32. All are free."""
        free = self.free_pages()
        left = free[~np.isin(free, pages)]
        assert len(left) == len(free) - len(pages), "a page was taken twice"
        self._stack[: len(left)] = left
        self._num_free = len(left)

    def free_pages(self) -> Pages:
        """The free page ids, for checks of invariants."""
        return self._stack[: self._num_free].copy()
