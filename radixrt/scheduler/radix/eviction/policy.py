"""The interface of eviction policies: they order the leaves that may be evicted.

The tree trims the leaf that :meth:`EvictionPolicy.pop` returns from its tail, page by page, and offers the rest again.
Whatever a policy may order by is on the node: last use, creation, hints. A policy that wants to know more listens to
the events.
"""

from abc import abstractmethod
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
        """``leaf`` may be evicted from now on. It is offered again when its place in the order may have changed."""

    @abstractmethod
    def pop(self) -> Node | None:
        """Take the leaf to evict first; None if every leaf is locked."""

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

    def take_shortened(self, limit: int) -> list[int]:
        """Up to ``limit`` waiting sequences of whose cached prefix a part was evicted, each told once."""
        return []
