"""A node of the radix tree."""

from radixrt.messages import TokenIds
from radixrt.scheduler.page_allocator import Pages


class Node:
    """One edge of the tree and the children below it."""

    __slots__ = ("children", "lock_count", "pages", "parent", "stamp", "tokens")

    def __init__(self, parent: "Node | None", tokens: TokenIds, pages: Pages) -> None:
        self.parent = parent
        self.tokens = tokens
        """Tokens of the edge above this node; a multiple of the page size."""
        self.pages = pages
        """One page id for each page of ``tokens``."""
        self.children: dict[bytes, Node] = {}
        """By the bytes of the first page's tokens."""
        self.lock_count = 0
        """Sequences that use this node or one below it."""
        self.stamp = 0
        """When it was last used, on the tree's own clock."""

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf. Roots have no parent, removed nodes have lost theirs."""
        return self.lock_count == 0 and not self.children and self.parent is not None
