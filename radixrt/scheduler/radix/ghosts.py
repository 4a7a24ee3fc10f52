"""Remembers evicted pages: when each was evicted, and by which rule.

An evicted page is named by the page before it, which is still in the tree, and a hash of its
tokens. A page is in the tree at most once, so its id stands for the whole prefix that ends with it.
When that page leaves the tree too, no lookup can reach what is remembered below it, and it is
forgotten: of an evicted conversation one entry remains.
"""

from collections.abc import Iterable
from typing import NamedTuple

from radixrt.messages.cache_root import CacheRoot
from radixrt.scheduler.radix.return_hazards import Visit

MAX_GHOSTS = 16384
"""Some 300 bytes each."""
GHOSTS_A_PAGE = 2
"""Ghosts for each page of the pool, if that is fewer: a small pool forgets its past soon."""

Before = int | CacheRoot
"""The id of the page before; of the first page of a prompt, the cache root."""


class Ghost(NamedTuple):
    """An eviction."""

    time: float
    """Seconds on the tree's clock."""
    rule: str
    visit: Visit | None = None
    """The last visit of its prefix."""


class GhostList:
    """The last evicted pages whose prefix is cached. The oldest are dropped beyond ``most``."""

    def __init__(self, most: int = MAX_GHOSTS) -> None:
        self._most = most
        self._below: dict[Before, dict[int, Ghost]] = {}
        """Ghosts by the page before, and then by the hashes of their tokens, the oldest first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, before: Before, page: bytes, ghost: Ghost) -> None:
        """A page with these packed tokens was evicted."""
        ghosts = self._below.pop(before, None) or {}
        self._below[before] = ghosts  # the last of all
        key = hash(page)
        self._count += ghosts.pop(key, None) is None
        ghosts[key] = ghost
        if self._count > self._most:
            oldest = next(iter(self._below))
            del self._below[oldest][next(iter(self._below[oldest]))]
            self._count -= 1
            if not self._below[oldest]:
                del self._below[oldest]

    def forget_below(self, pages: Iterable[int]) -> None:
        """These pages have left the tree."""
        if self._below:
            for page in pages:
                if (ghosts := self._below.pop(page, None)) is not None:
                    self._count -= len(ghosts)

    def find(self, before: Before, page: bytes) -> Ghost | None:
        """The last eviction of a page with these packed tokens."""
        return self._below.get(before, {}).get(hash(page))
