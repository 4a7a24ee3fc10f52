"""Rates and latencies of the last seconds, from counters read now and then."""

import time
from collections import deque
from typing import NamedTuple

import msgspec

from radixrt.kv.reading import Quantiles, Rates
from radixrt.messages.stats import RequestStats, SchedulerStats, TimeHistogram

WINDOW_S = 10.0
"""Least time over which rates are computed, once there are samples of that age."""
MIN_SAMPLE_S = 0.5
"""Least time between two samples that are kept."""


class _Sample(NamedTuple):
    """The counters at one time."""

    time_s: float
    stats: SchedulerStats
    ttft: TimeHistogram
    itl: TimeHistogram


class RecentCounters:
    """The counters of the last seconds.

    Args:
        requests: latencies, which the api process keeps counting.
    """

    def __init__(self, requests: RequestStats) -> None:
        self._requests = requests
        self._samples: deque[_Sample] = deque()
        """The newest that is older than the window, if there is one, and those within it."""

    def take(self, stats: SchedulerStats) -> None:
        """Add the counters of this moment."""
        requests = self._requests
        now = _Sample(time.monotonic(), stats, _copy(requests.ttft), _copy(requests.itl))
        samples = self._samples
        if samples and stats.steps < samples[-1].stats.steps:
            samples.clear()  # a new engine counts from the beginning
        if len(samples) > 1 and samples[-1].time_s - samples[-2].time_s < MIN_SAMPLE_S:
            samples.pop()
        samples.append(now)
        while len(samples) > 2 and now.time_s - samples[1].time_s >= WINDOW_S:
            samples.popleft()

    def rates(self, max_age_s: float = 2 * WINDOW_S) -> Rates:
        """Rates since the oldest sample, but not since one that is older than ``max_age_s``."""
        if not self._samples:
            return Rates()
        last = self._samples[-1]
        first = next(one for one in self._samples if last.time_s - one.time_s <= max_age_s)
        seconds = last.time_s - first.time_s
        if seconds <= 0:
            return Rates()
        before, after = first.stats, last.stats
        prompt = after.prompt_tokens - before.prompt_tokens
        cached = after.cached_tokens - before.cached_tokens
        return Rates(
            seconds=seconds,
            hit_rate=cached / prompt if prompt else None,
            generated_tokens_per_s=(after.output_tokens - before.output_tokens) / seconds,
            cached_tokens_per_s=cached / seconds,
            computed_tokens_per_s=(prompt - cached) / seconds,
            evicted_pages_per_s=(after.evicted_pages - before.evicted_pages) / seconds,
            ttft=_quantiles(first.ttft, last.ttft),
            itl=_quantiles(first.itl, last.itl),
        )


def _copy(histogram: TimeHistogram) -> TimeHistogram:
    return msgspec.structs.replace(histogram, counts=[*histogram.counts])


def _quantiles(before: TimeHistogram, after: TimeHistogram) -> Quantiles | None:
    """Quantiles of what a histogram has got in between; None: nothing."""
    counts = [new - old for old, new in zip(before.counts, after.counts, strict=True)]
    if not any(counts):
        return None
    return Quantiles(*(_quantile(after.bounds, counts, share) for share in (0.5, 0.9, 0.99)))


def _quantile(bounds: list[float], counts: list[int], share: float) -> float:
    """Interpolated within its bucket, as Prometheus does."""
    left = share * sum(counts)
    for low, high, count in zip([0.0, *bounds], bounds, counts, strict=False):
        if count >= left:
            return low + (high - low) * (left / count)
        left -= count
    return bounds[-1]
