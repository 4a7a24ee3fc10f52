"""Who wants to hear which pages enter and leave the radix tree: the KV-event stream of a router."""

from typing import Protocol

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.page_allocator import Pages


class TreeObserver(Protocol):
    """Set as ``RadixTree.observer``; called at once, so it must be quick and must not touch the tree.
    It may keep the arrays it is given: they never change.

    A page is in the tree once or not at all, so its id stands for the whole prefix that ends with it: an observer
    that keeps a block hash for each page needs no more than these two calls. That edges are split and
    joined changes no prefix and is not told.
    """

    def stored(
        self, salt: str | None, previous_page: int | None, tokens: TokenIds, pages: Pages
    ) -> None:
        """Pages have entered the tree.

        Args:
            salt: the namespace, where the pages begin one; else None.
            previous_page: the page they come after; None if they begin a namespace.
            tokens: what they hold: [len(pages) * page_size], read-only.
            pages: page ids, in order of position.
        """

    def removed(self, pages: Pages) -> None:
        """Pages have left the tree: evicted, dropped or flushed. Read-only, in no order to rely on."""
