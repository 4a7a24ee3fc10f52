"""A node of the radix tree."""

from radixrt.messages import TokenIds
from radixrt.scheduler.page_allocator import Pages

RETAIN_DEFAULT = 1
"""The retention level of what no client has given a hint for; 0 is worth less, 2 and above more."""


class Node:
    """One edge of the tree and the children below it."""

    __slots__ = (
        "children",
        "created",
        "expires",
        "lock_count",
        "pages",
        "parent",
        "retention",
        "stamp",
        "tokens",
        "traffic_class",
    )

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
        self.created = 0
        """When its pages came into the tree, on the same clock."""
        self.traffic_class = 0
        """What the eviction policy took the request for that used it last."""
        self.retention = RETAIN_DEFAULT
        """How much a client wants it kept; see :data:`RETAIN_DEFAULT`."""
        self.expires: float | None = None
        """When ``retention`` ends, in seconds on the scheduler's clock; None: never."""

    def inherit(self, other: "Node") -> None:
        """Take over what eviction policies know of ``other``, of which this node has been a part."""
        self.stamp, self.created, self.traffic_class = (
            other.stamp,
            other.created,
            other.traffic_class,
        )
        self.retention, self.expires = other.retention, other.expires

    @property
    def is_evictable(self) -> bool:
        """An unlocked leaf. Roots have no parent, removed nodes have lost theirs."""
        return self.lock_count == 0 and not self.children and self.parent is not None
