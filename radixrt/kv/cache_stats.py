"""How full is the KV cache, and what is it worth? The scheduler's counters about it, in tokens."""

import msgspec

from radixrt.messages.stats import SchedulerStats


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """What the KV pool holds, in one unit. ``owned + cached + free`` is ``total``."""

    total: int
    owned: int
    """By running sequences alone."""
    cached: int
    """In the radix tree."""
    evictable: int
    """Of those cached, in nobody's use."""
    pinned: int
    """Of those cached, under a lease."""
    free: int

    def in_tokens(self, page_size: int) -> "PoolUse":
        return PoolUse(
            **{n: page_size * count for n, count in msgspec.structs.asdict(self).items()}
        )


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start and gauges of this moment."""

    page_size: int
    """Tokens in a page."""
    pages: PoolUse
    tokens: PoolUse
    """The same in tokens that there is room for; the last page of a sequence need not be full."""
    prompt_tokens: int
    """Of sequences that began."""
    cached_tokens: int
    """Of those, found in the tree."""
    cache_write_tokens: int
    """Of those, computed and put into the tree."""
    hit_rate: float
    """cached_tokens / prompt_tokens; 0 before there are any."""
    evicted_pages: int
    evicted_tokens: int
    retractions: int
    """Sequences set back for lack of pages."""
    tree_nodes: int
    leases: int
    leases_broken: int
    """Given up before their time, since a sequence could not have gone on."""
    sessions: int
    """Named by hints and not ended."""

    @staticmethod
    def of(stats: SchedulerStats, page_size: int) -> "CacheStats":
        pages = PoolUse(
            total=stats.pages_total,
            owned=stats.pages_owned,
            cached=stats.pages_cached,
            evictable=stats.pages_evictable,
            pinned=stats.pages_pinned,
            free=stats.pages_free,
        )
        return CacheStats(
            page_size=page_size,
            pages=pages,
            tokens=pages.in_tokens(page_size),
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            cache_write_tokens=stats.cache_write_tokens,
            hit_rate=stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            evicted_pages=stats.evicted_pages,
            evicted_tokens=stats.evicted_pages * page_size,
            retractions=stats.retractions,
            tree_nodes=stats.tree_nodes,
            leases=stats.leases,
            leases_broken=stats.leases_broken,
            sessions=stats.sessions,
        )
