"""A reading of a server: its counters, latencies and cache at one time. The web page and ``radixrt
top`` show readings."""

import msgspec

from radixrt.kv.cache_stats import CacheStats, PoolParts
from radixrt.messages.cache_tree import CacheTree
from radixrt.messages.stats import RequestStats, SchedulerStats, TenantStats


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
