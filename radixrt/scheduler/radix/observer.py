"""The interface of observers of the radix tree, such as the stream of KV events."""

from typing import Protocol

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.page_allocator import Pages


class TreeObserver(Protocol):
    """Set as ``RadixTree.observer``. It is called during changes, so it must be fast and must not change the tree. It may
    keep the arrays, which never change.

    A page is in the tree at most once, so its id identifies the whole prefix that ends with it. An observer that keeps a
    block hash for each page needs only these two calls. Splits and joins change no prefix and are not reported.
    """

    def stored(
        self, salt: str | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        """Pages have entered the tree.

        Args:
            salt: the cache salt, if the pages are the first after a root; else None.
            previous_page: the page before them; None if they are the first after a root.
            tokens: their token ids: [len(pages) * page_size], int32, read-only.
            pages: page ids, in order of position: [num_pages], int32.
        """

    def removed(self, pages: Pages) -> None:
        """Pages have left the tree: evicted, dropped or flushed. Read-only, in arbitrary order."""
