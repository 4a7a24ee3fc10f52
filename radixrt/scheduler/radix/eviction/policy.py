"""The interface of eviction policies: they order the leaves that may be evicted.

The tree trims the leaf that :meth:`EvictionPolicy.pop` returns from its tail, page by page, and
offers the rest again. A node has the attributes for the order of eviction: last use, creation,
hints. Events inform a policy of further facts, such as the waiting queue.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Protocol

from radixrt.scheduler.radix.node import Node


class EvictionPolicy(Protocol):
    """Orders the leaves that may be evicted."""

    orders_by_priority: bool = False
    """Whether requests note their ``priority`` on the nodes that they used."""
    follows_queue: bool = False
    """Whether the waiting queue tells :meth:`expect` and :meth:`forget`."""

    @abstractmethod
    def offer(self, leaf: Node) -> None:
        """``leaf`` may be evicted from now on. It is offered again when its place in the order may
        have changed."""

    @abstractmethod
    def pop(self) -> Node | None:
        """Take the leaf to evict first; None if every leaf is locked."""

    def taken(self, leaf: Node) -> None:
        """``leaf`` is evicted now for another reason than its place in the order."""
        return

    # ------------------------------------------------------------ events of the waiting queue

    def expect(self, seq_id: int, arrived: float, node: Node) -> None:
        """A sequence waits whose cached prefix ends at the end of ``node``.

        Args:
            arrived: time of its arrival, in seconds.
        """
        return

    def forget(self, seq_id: int) -> None:
        """A sequence waits no longer. Unknown ids are ignored."""
        return

    def awaited(self) -> Iterable[tuple[Node, int]]:
        """Nodes in whose edges the cached prefixes of waiting sequences end, with the number of
        these sequences."""
        return ()

    def take_shortened(self, limit: int) -> list[int]:
        """Return up to ``limit`` waiting sequences whose cached prefix was shortened by eviction.
        Each is returned once."""
        return []
