"""What does an engine count and measure of itself?"""

from bisect import bisect_left

import msgspec


class TimeHistogram(msgspec.Struct):
    """A Prometheus-style histogram: ``counts[i]`` observations ≤ ``bounds[i]``, not cumulative; the last
    entry of counts is what lies above all bounds."""

    bounds: list[float]
    counts: list[int]
    total: float = 0.0

    @staticmethod
    def empty(bounds: list[float]) -> "TimeHistogram":
        return TimeHistogram(bounds, [0] * (len(bounds) + 1))

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds


class StructuredStats(msgspec.Struct, kw_only=True):
    """Counters of structured output since start, from the tokenizer process."""

    requests: int = 0
    """Constraints asked for."""
    refused: int = 0
    """Of those, what can't be enforced."""
    checks: int = 0
    """Values that a validator looked at."""
    retries: int = 0
    """Values that were taken back."""
    exhausted: int = 0
    """Requests that failed because no valid value was found."""
    violations: int = 0
    """Finished answers that broke a schema although it was enforced: bugs."""
    cache_hits: int = 0
    """Constraints that were compiled already."""
    cache_misses: int = 0
    helpers_killed: int = 0
    """Helper processes that went over a limit of time or memory."""


class Counters(msgspec.Struct, kw_only=True):
    """What the scheduler counts since start."""

    prompt_tokens: int = 0
    """Of admitted sequences."""
    cached_tokens: int = 0
    """Of those, found in the tree."""
    cache_write_tokens: int = 0
    """Prompt tokens computed and put into the tree."""
    output_tokens: int = 0
    forced_tokens: int = 0
    """Of output_tokens, those that a grammar forced: no forward pass sampled them."""
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    retractions: int = 0
    steps: int = 0
    step_seconds: TimeHistogram
    """Wall time of a step on the worker."""
    plan_seconds: TimeHistogram
    """Time the scheduler took to plan a step."""
    forward_seconds: float = 0.0
    """Of step_seconds, the model's forward passes; all steps together."""
    wait_seconds: float = 0.0
    """Time that the worker waited for plans although there was work; all steps together."""


class SchedulerStats(Counters, kw_only=True):
    """The counters, and gauges of this moment."""

    running: int
    waiting: int
    evicted_pages: int
    """Since start."""
    pages_total: int
    pages_owned: int
    """Held by running sequences alone."""
    pages_cached: int
    """In the tree, locked or not."""
    pages_evictable: int
    """In the tree and not locked."""
    pages_free: int
    pages_pinned: int
    """In the tree, under a lease."""
    leases: int
    leases_broken: int
    """Since start, given up before their time, as a sequence could not have gone on."""
    sessions: int
    """Named by hints and not ended."""
    grammars: int
    """That the worker holds."""
    tree_nodes: int
    malformed_frames: int
    """Frames that any process could not read."""
    request_log_dropped: int = 0
    """Lines of the request log that could not be written."""
    kv_events: int = 0
    """Published on the KV-event stream."""
    kv_event_replays: int = 0
    """Times that a subscriber got batches again that it had missed."""
    kv_event_snapshots: int = 0
    """Times that a subscriber lacked more than is kept."""
    structured: StructuredStats = msgspec.field(default_factory=StructuredStats)
    """Filled in by the tokenizer process."""
