"""Leases: prefixes that clients have pinned in the cache for a time.

A lease locks a prefix of the tree like a running sequence does, so eviction and ``flush_cache``
spare it. Leases take memory from other requests, so their time is bounded, and so is the share of
the pool under leases (a page under several leases counts once). If the only running sequence lacks
pages, the lease that expires first is broken.
"""

import math
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from radixrt.base.errors import RequestError
from radixrt.kv.cache_hint import check_pin_seconds
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds
from radixrt.messages.requests import NO_TENANT, Tenant
from radixrt.scheduler.lazy_heap import LazyHeap
from radixrt.scheduler.radix.node import Match, Node
from radixrt.scheduler.radix.states import NO_ROW, KeptStates
from radixrt.scheduler.radix.tree import RadixTree

MAX_LEASES = 65_536


@dataclass(frozen=True, slots=True)
class Lease:
    """A pinned prefix."""

    lease_id: str
    """Random and secret: a client that knows it may end the lease."""
    tenant: str
    """Name of the only tenant that may do so."""
    namespace: str
    """The namespace of its prefix."""
    node: Node
    """The node at whose end the prefix ends."""
    num_pages: int
    expires: float
    """On the scheduler's clock."""
    state: int
    """The row of the state that is pinned with it; negative: none is."""


class Leases:
    """The leases in force.

    Args:
        max_pages: most pages under leases at a time.
        pool_pages: all pages, of which tenants have shares.
    """

    def __init__(
        self,
        tree: RadixTree,
        max_pages: int,
        clock: Callable[[], float],
        pool_pages: int | None = None,
        states: KeptStates | None = None,
    ) -> None:
        self._tree = tree
        self._states = states or KeptStates(0, 0)
        self._max_pages = max_pages
        self._pool_pages = max_pages if pool_pages is None else pool_pages
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._by_expiry: LazyHeap[str] = LazyHeap()
        self._pages: Counter[str] = Counter()
        """Pages under leases in each namespace; a page under several counts once."""
        self.broken = 0
        """Leases ended before their time."""

    def __len__(self) -> int:
        return len(self._leases)

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def pages_of(self, namespace: str) -> int:
        """Pages of a namespace under leases."""
        return self._pages[namespace]

    def pin(
        self,
        tokens: TokenIds,
        root: CacheRoot,
        ttl_s: float,
        lease_id: str = "",
        tenant: Tenant = NO_TENANT,
    ) -> Lease:
        """Lease the cached prefix of a prompt, in whole pages.

        Args:
            lease_id: of a lease that another engine had granted; empty: a new id.

        Raises:
            RequestError: no full page is cached, or the lease would exceed a bound.
        """
        check_pin_seconds(ttl_s)
        match = self._tree.match(tokens, root)
        if match is None or match.num_pages == 0:
            raise RequestError(
                "The cache holds no full page of this prompt, so there is nothing to pin. Warm it first; prompts shorter "
                f"than a page of {self._tree.page_size} tokens, and servers with --disable-radix-cache, keep nothing.",
                status=409,
            )
        namespace = root.tenant
        self._check_bounds(match, tenant)
        self._check_share(match, namespace, tenant)
        pages = match.pages  # a lock may split the edge
        node = self._tree.lock_match(match)
        before = self._tree.num_pinned_pages
        self._tree.pin(node)
        self._pages[namespace] += self._tree.num_pinned_pages - before
        if (taken := self._leases.get(lease_id)) is not None:
            self.end(taken)  # its client has asked twice
        lease = Lease(
            lease_id or secrets.token_hex(12),
            tenant.name,
            namespace,
            node,
            match.num_pages,
            self._clock() + ttl_s,
            self._states.pin(pages) if self._states else NO_ROW,
        )
        self._leases[lease.lease_id] = lease
        self._by_expiry.place(lease.lease_id, lease.expires)
        return lease

    def release(self, lease_id: str, tenant: Tenant = NO_TENANT) -> Lease:
        """End a lease. Its pages may be evicted again, in the order of their last use.

        Raises:
            RequestError: the tenant has no such lease (any more).
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.tenant != tenant.name:
            raise RequestError(
                "There is no such lease: it has expired, was released, or was given up because a request needed "
                "its memory.",
                status=404,
            )
        self.end(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """End a lease of any tenant."""
        del self._leases[lease.lease_id]
        self._by_expiry.discard(lease.lease_id)
        if lease.state >= 0:
            self._states.unpin(lease.state)
        before = self._tree.num_pinned_pages
        self._tree.unpin(lease.node)
        self._pages[lease.namespace] -= before - self._tree.num_pinned_pages
        if not self._pages[lease.namespace]:
            del self._pages[lease.namespace]

    def expire(self) -> None:
        """End the leases that have expired."""
        while self.seconds_to_next_expiry() == 0.0:
            self.end(self._leases[self._by_expiry.first()])

    def revoke_soonest(self) -> bool:
        """End the lease that expires first; False if there is none."""
        if not self._leases:
            return False
        self.end(self._leases[self._by_expiry.first()])
        self.broken += 1
        return True

    def seconds_to_next_expiry(self) -> float | None:
        """Seconds until :meth:`expire` has to be called; None: there is no lease."""
        if not self._leases:
            return None
        return max(0.0, self._leases[self._by_expiry.first()].expires - self._clock())

    def _check_share(self, match: Match, namespace: str, tenant: Tenant) -> None:
        """Hold a tenant to its own share of the pool."""
        most = int(tenant.max_pinned_fraction * self._pool_pages)
        pinned, added = self._pages[namespace], match.num_unpinned_pages
        if pinned + added > most:
            size = self._tree.page_size
            raise RequestError(
                f"{pinned * size} tokens are pinned by this API key and this prompt adds {added * size}, more than the "
                f"{most * size} that the key may pin (max_pinned_fraction). Release a lease, or pin a shorter prefix.",
                status=429,
                retry_after_s=max(1, math.ceil(self.seconds_to_next_expiry() or 0)),
            )

    def _check_bounds(self, match: Match, tenant: Tenant) -> None:
        tree, size = self._tree, self._tree.page_size
        if match.num_pages > self._max_pages:
            raise RequestError(
                f"{match.num_pages * size} tokens of this prompt are cached, and at most {self._max_pages * size} "
                "tokens may be pinned on this server (--max-pinned-fraction); pin a shorter prefix.",
                param="prompt",
            )
        added = match.num_unpinned_pages
        if tree.num_pinned_pages + added > self._max_pages or len(self) >= MAX_LEASES:
            # of the leases of other tenants no numbers are told
            pinned = f"{tree.num_pinned_pages * size} tokens are pinned by {len(self)} leases"
            if tenant.name:
                pinned = "Other prompts are pinned"
            raise RequestError(
                f"{pinned} and this prompt adds {added * size}, more than the {self._max_pages * size} that may be pinned at a time "
                "(--max-pinned-fraction). Release a lease, pin a shorter prefix, or retry when one has expired.",
                status=429,
                retry_after_s=max(1, math.ceil(self.seconds_to_next_expiry() or 0)),
            )
