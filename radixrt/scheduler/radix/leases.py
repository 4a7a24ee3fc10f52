"""Leases: prefixes that clients have pinned in the cache for a time.

A lease locks a prefix of the tree like a running sequence does, so eviction and ``flush_cache`` spare it. Leases take
memory from other requests, so their time is bounded, and so is the share of the pool under leases (a page under several
leases counts once). If the only running sequence lacks pages, the lease that expires first is broken.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from radixrt.base.errors import RequestError
from radixrt.kv.cache_hint import check_pin_seconds
from radixrt.messages.ids import TokenIds
from radixrt.scheduler.lazy_heap import LazyHeap
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.tree import Match, RadixTree

MAX_LEASES = 65_536


@dataclass(frozen=True, slots=True)
class Lease:
    """A pinned prefix."""

    lease_id: str
    """Random and secret: a client that knows it may end the lease."""
    node: Node
    """The node at whose end the prefix ends."""
    num_pages: int
    expires: float
    """On the scheduler's clock."""


class Leases:
    """The leases in force.

    Args:
        max_pages: most pages under leases at a time.
        clock: seconds from any fixed moment.
    """

    def __init__(self, tree: RadixTree, max_pages: int, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._max_pages = max_pages
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._by_expiry: LazyHeap[str] = LazyHeap()
        self.broken = 0
        """Leases ended before their time."""

    def __len__(self) -> int:
        return len(self._leases)

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def pin(self, tokens: TokenIds, salt: str, ttl_s: float, lease_id: str = "") -> Lease:
        """Lease the cached prefix of a prompt, in whole pages.

        Args:
            lease_id: of a lease that another engine had granted; empty: a new id.

        Raises:
            RequestError: no full page is cached, or the lease would exceed a bound.
        """
        check_pin_seconds(ttl_s)
        match = self._tree.match(tokens, salt)
        if match is None or match.num_pages == 0:
            raise RequestError(
                "The cache holds no full page of this prompt, so there is nothing to pin. Warm it first; prompts shorter "
                f"than a page of {self._tree.page_size} tokens, and servers with --disable-radix-cache, keep nothing.",
                status=409,
            )
        self._check_bounds(match)
        node = self._tree.lock_match(match)
        self._tree.pin(node)
        lease_id = lease_id or secrets.token_hex(12)
        lease = Lease(lease_id, node, match.num_pages, self._clock() + ttl_s)
        self._leases[lease.lease_id] = lease
        self._by_expiry.place(lease.lease_id, lease.expires)
        return lease

    def release(self, lease_id: str) -> Lease:
        """End a lease. Its pages may be evicted again, in the order of their last use.

        Raises:
            RequestError: there is no such lease (any more).
        """
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            raise RequestError(
                "There is no such lease: it has expired, was released, or was given up because a request needed "
                "its memory.",
                status=404,
            )
        self._by_expiry.discard(lease_id)
        self._tree.unpin(lease.node)
        return lease

    def expire(self) -> None:
        """End the leases that have expired."""
        while self.seconds_to_next_expiry() == 0.0:
            self.release(self._by_expiry.first())

    def break_first(self) -> bool:
        """End the lease that expires first; False if there is none."""
        if not self._leases:
            return False
        self.release(self._by_expiry.first())
        self.broken += 1
        return True

    def seconds_to_next_expiry(self) -> float | None:
        """Seconds until :meth:`expire` has to be called; None: there is no lease."""
        if not self._leases:
            return None
        return max(0.0, self._leases[self._by_expiry.first()].expires - self._clock())

    def _check_bounds(self, match: Match) -> None:
        tree, size = self._tree, self._tree.page_size
        if match.num_pages > self._max_pages:
            raise RequestError(
                f"{match.num_pages * size} tokens of this prompt are cached, and at most {self._max_pages * size} "
                "tokens may be pinned on this server (--max-pinned-fraction); pin a shorter prefix.",
                param="prompt",
            )
        added = tree.num_unpinned_pages(match)
        if tree.num_pinned_pages + added > self._max_pages or len(self) >= MAX_LEASES:
            raise RequestError(
                f"{tree.num_pinned_pages * size} tokens are pinned by {len(self)} leases and this prompt adds "
                f"{added * size}, more than the {self._max_pages * size} that may be pinned at a time "
                "(--max-pinned-fraction). Release a lease, pin a shorter prefix, or retry when one has expired.",
                status=429,
                retry_after_s=max(1, math.ceil(self.seconds_to_next_expiry() or 0)),
            )
