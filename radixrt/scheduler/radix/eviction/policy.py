"""What does the tree ask of an eviction policy?

The tree trims the leaf that :meth:`EvictionPolicy.pop` returns from its tail, page by page, and offers what is
left of it again. What a policy may go by is on the node: when it was used, when it was made, how many turns of a
conversation led to it, what its client asked for.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.node import Node


@dataclass(eq=False, slots=True)
class Use:
    """What a policy has noted of one request."""

    kind: int
    """A class of traffic, which is noted on the nodes that the request uses last."""


class EvictionPolicy(Protocol):
    """Orders the leaves that may be evicted. One that learns from the traffic observes requests, too."""

    @abstractmethod
    def offer(self, leaf: Node) -> None:
        """``leaf`` may be evicted from now on. It is offered again whenever what is known of it has changed."""

    @abstractmethod
    def pop(self) -> Node | None:
        """Take the leaf that should go first; None if every leaf is locked."""

    def observe(self, tokens: TokenIds, salt: str) -> Use | None:
        """A request with this prompt is being admitted. None: the policy does not learn."""
        return None

    def observe_end(self, use: Use, num_output: int) -> None:
        """Its answer is complete, or its client gone, after so many tokens: may change its kind."""
        return
