"""A reading of a server: its counters, latencies and cache at one time. The web page and ``radixrt
top`` show readings."""

import msgspec

from radixrt.messages.cache_tree import CacheTree
from radixrt.messages.stats import RequestStats, SchedulerStats, TenantStats


class PoolUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the KV pool, in one unit. ``owned + cached + free`` is ``total``."""

    total: int
    owned: int
    """Used by one running sequence each, outside the radix tree."""
    cached: int
    """Pages in the radix tree."""
    evictable: int
    """Cached pages that no running sequence uses and no lease holds."""
    pinned: int
    """Cached pages under a lease."""
    free: int

    @property
    def parts(self) -> "PoolParts":
        held = self.cached - self.evictable
        return PoolParts(
            owned=self.owned,
            locked=max(0, held - self.pinned),
            pinned=min(held, self.pinned),
            evictable=self.evictable,
            free=self.free,
        )

    def in_tokens(self, page_size: int) -> "PoolUse":
        return PoolUse(
            **{n: page_size * count for n, count in msgspec.structs.asdict(self).items()}
        )


class PoolParts(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool, in one unit, of which each is counted once. The names are those of all
    displays."""

    owned: int
    """Used by one running sequence each, outside the radix tree."""
    locked: int
    """In the tree, used by running sequences."""
    pinned: int
    """In the tree, under a lease."""
    evictable: int
    free: int


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges."""

    page_size: int
    """Tokens in a page."""
    pages: PoolUse
    tokens: PoolUse
    """The same in tokens of capacity; the last page of a sequence need not be full."""
    prompt_tokens: int
    """Prompt tokens of admitted sequences."""
    cached_tokens: int
    """Prompt tokens that were found in the tree."""
    cache_write_tokens: int
    """Prompt tokens that were computed and inserted into the tree."""
    hit_rate: float
    """cached_tokens / prompt_tokens; 0 before there are any."""
    evicted_pages: int
    evicted_tokens: int
    retractions: int
    """Sequences retracted for lack of pages."""
    tree_nodes: int
    leases: int
    leases_broken: int
    """Leases broken because the only running sequence lacked pages."""
    sessions: int
    """Sessions named by hints and not ended."""
    kept_states: int
    """States of recurrent layers; 0 where a model has no such layers."""
    kept_state_bytes: int
    stateless_tokens: int
    """Prompt tokens that were found in the tree and computed again for lack of a state."""
    disk_tokens: int = 0
    """Prompt tokens that were read from disk, among the cached ones."""
    disk_pages: int = 0
    """Pages on disk (``--cache-dir``), as the next ones."""
    disk_pages_read: int = 0
    disk_pages_written: int = 0
    disk_pages_dropped: int = 0
    """They gave place to others, or were damaged."""
    disk_pages_damaged: int = 0
    disk_stopped: int = 0
    """1: nothing is written any more, because the disk is full or broken; of several replicas their
    number."""

    @staticmethod
    def from_scheduler(stats: SchedulerStats, page_size: int) -> "CacheStats":
        pages = PoolUse(**{n: getattr(stats, f"pages_{n}") for n in PoolUse.__struct_fields__})
        shared = {*CacheStats.__struct_fields__} & {*stats.__struct_fields__}
        return CacheStats(
            **{name: getattr(stats, name) for name in shared},
            page_size=page_size,
            pages=pages,
            tokens=pages.in_tokens(page_size),
            hit_rate=stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
            evicted_tokens=stats.evicted_pages * page_size,
        )


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a latency, in seconds."""

    p50: float
    p90: float
    p99: float


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has done in the last seconds; None: not known yet, or there was nothing to
    measure."""

    seconds: float = 0.0
    hit_rate: float | None = None
    """Cached share of the prompt tokens."""
    generated_tokens_per_s: float | None = None
    cached_tokens_per_s: float | None = None
    """Tokens of prompts, found in the tree."""
    computed_tokens_per_s: float | None = None
    """Tokens of prompts, not found in the tree."""
    evicted_pages_per_s: float | None = None
    ttft: Quantiles | None = None
    itl: Quantiles | None = None


class EngineReading(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests together do. ``/metrics`` shows the same structs."""

    stats: SchedulerStats
    requests: RequestStats
    cache: CacheStats
    pool: PoolParts
    rates: Rates


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A server's state at one time."""

    time_s: float
    """On the server's monotonic clock."""
    model: str
    device: str
    kv_bytes_per_token: int
    is_admin: bool
    """Whether the caller may see texts, pin and release."""
    engine: EngineReading | None = None
    """None: the caller may not see it."""
    own: TenantStats | None = None
    """The statistics of the caller's key; None: it has no part of its own."""
    tree: CacheTree
    """As far as the caller may see it."""
