"""A reading of a server: its counters, latencies and cache at one time. The web page and ``radixrt
top`` show readings."""

import msgspec

from radixrt.kv.cache_stats import CacheStats
from radixrt.messages.cache_tree import CacheTree
from radixrt.messages.stats import RequestStats, SchedulerStats, TenantStats


class EngineReading(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests together do. ``/metrics`` shows the same structs."""

    stats: SchedulerStats
    requests: RequestStats
    cache: CacheStats


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
