"""What does the tree ask of an eviction policy, and which are there?

The tree trims the leaf that :meth:`EvictionPolicy.pop` returns from its tail, page by page, and offers what is
left of it again. What a policy may go by is on the node: when it was used, when it was made, how many turns of a
conversation led to it, what its client asked for.
"""

from collections.abc import Callable
from typing import Protocol

from radixrt.messages import TokenIds
from radixrt.scheduler.eviction.names import EvictionPolicyName
from radixrt.scheduler.node import Node


class EvictionPolicy(Protocol):
    """Orders the leaves that may be evicted."""

    def offer(self, leaf: Node) -> None:
        """``leaf`` may be evicted from now on. It is offered again whenever what is known of it has changed."""

    def pop(self) -> Node | None:
        """Take the leaf that should go first; None if every leaf is locked."""

    def observe(self, tokens: TokenIds, salt: str) -> int:
        """A request with this prompt is being admitted; for policies that learn from the traffic.

        Returns:
            How many requests led to this prompt, itself included, each going on where the one before ended; 0 if
            the policy does not count them. It is noted on the nodes that the request uses last.
        """


def make_policy(
    name: EvictionPolicyName, num_pages: int, page_size: int, clock: Callable[[], float]
) -> EvictionPolicy:
    """A new policy for a pool of ``num_pages`` pages that heeds hints; ``clock`` gives seconds."""
    from radixrt.scheduler.eviction.hinted import Hinted

    return Hinted(make_base_policy(name, num_pages, page_size, clock), clock)


def make_base_policy(
    name: EvictionPolicyName, num_pages: int, page_size: int, clock: Callable[[], float]
) -> EvictionPolicy:
    """What orders the leaves that nobody has said anything of."""
    from radixrt.scheduler.eviction.duel import Duel
    from radixrt.scheduler.eviction.fifo import FIFO
    from radixrt.scheduler.eviction.lru import LeafLRU
    from radixrt.scheduler.eviction.priority import Priority

    match name:
        case "lru":
            return LeafLRU()
        case "fifo":
            return FIFO()
        case "priority":
            return Priority()
        case "duel":
            return Duel(num_pages, page_size, clock)
