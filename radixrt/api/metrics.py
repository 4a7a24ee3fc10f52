"""``/metrics``: latencies measured in the api process, the scheduler's counters, fetched at each
scrape, and rates of the last seconds."""

import asyncio
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, get_type_hints

import msgspec
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from radixrt.api.metric_names import NamedMetrics
from radixrt.api.tracing import current_trace
from radixrt.base.config import ServerConfig
from radixrt.base.settings.setting import METRICS_PEERS, listed
from radixrt.client.engine_client import EngineClient
from radixrt.kv.reading import Quantiles, Rates
from radixrt.messages.answers import AnswerChunk, EngineInfo
from radixrt.messages.calls import StatsCall
from radixrt.messages.ids import num_ids
from radixrt.messages.stats import (
    Metric,
    RequestStats,
    SchedulerStats,
    StructuredStats,
    TimeHistogram,
)

log = logging.getLogger(__name__)

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


STATS_TIMEOUT_S = 5


class Metrics:
    """The counters of one api process."""

    def __init__(self, config: ServerConfig, info: EngineInfo) -> None:
        disable_created_metrics()  # the library's: an unused time stamp for each metric
        self.registry = CollectorRegistry()
        self.requests = RequestStats()
        self.recent = RecentCounters(self.requests)
        self.engine = EngineCollector(self.requests, self.recent, info.page_size)
        self.registry.register(self.engine)
        self.exported = CollectorRegistry()
        """The metrics of ``registry`` as ``/metrics`` shows them."""
        sizes = {
            "block_size": str(info.page_size),
            "num_gpu_blocks": str(info.kv_pool_tokens // info.page_size),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(not config.disable_radix_cache),
        }
        peers = tuple(peer for peer in METRICS_PEERS if peer in listed(config.metrics_compat))
        self.exported.register(NamedMetrics(self.registry, config.model_name, peers, sizes))
        self.answers = Counter(
            "radixrt_answers",
            "Answers by how they ended: stop, length, abort; HTTP requests that were cut short: error, client_left.",
            ["outcome"],
            registry=self.registry,
        )

        self.refused = Counter(
            "radixrt_refused_requests",
            "HTTP requests that were refused because too many were open.",
            registry=self.registry,
        )
        self.slow_readers = Counter(
            "radixrt_slow_readers",
            "Connections that were cut because the client did not read its answer.",
            registry=self.registry,
        )

    async def refresh(self, client: EngineClient) -> None:
        """Ask for the counters of the scheduler; they are left out of the registry if it does not
        reply in time."""
        try:
            stats = await asyncio.wait_for(client.call(StatsCall()), STATS_TIMEOUT_S)
            self.recent.take(stats)
            self.engine.stats = stats
        except TimeoutError:
            log.warning("The scheduler did not send its counters within %d s.", STATS_TIMEOUT_S)
            self.engine.stats = None


class AnswerTimer:
    """Observes the chunks of one request as they come in."""

    def __init__(
        self, metrics: Metrics, streams: bool, count_tokens: Callable[[int], None]
    ) -> None:
        """
        Args:
            count_tokens: called with numbers of tokens of the prompt and the answers.
        """
        self._count_tokens = count_tokens
        self._metrics = metrics
        self._requests = metrics.requests
        self._streams = streams
        self._trace = current_trace()
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}
        """Time of each answer's last chunk."""

    def observe(self, chunk: AnswerChunk) -> None:
        now = time.perf_counter()
        num_new = num_ids(chunk.token_ids)
        self._count_tokens(num_new if self._last else chunk.report.prompt_tokens + num_new)
        last = self._last.get(chunk.index)
        if last is not None:
            if num_new:
                self._requests.itl.observe((now - last) / num_new, times=num_new)
        elif self._streams:
            self._requests.ttft.observe(now - self._began)
        self._last[chunk.index] = now
        if chunk.finish_reason is not None:
            self._observe_end(chunk, now)

    def _observe_end(self, chunk: AnswerChunk, now: float) -> None:
        self._requests.e2e.observe(now - self._began)
        self._metrics.answers.labels(chunk.finish_reason).inc()
        report = chunk.report
        first_s = report.queued_s + report.prefill_s
        if not self._streams:
            self._requests.ttft.observe(first_s)
        decode_s = max(0.0, report.total_s - first_s)
        self._requests.queue_time.observe(report.queued_s)
        self._requests.prefill_time.observe(report.prefill_s)
        self._requests.decode_time.observe(decode_s)
        self._requests.answer_length.observe(report.output_tokens)
        if self._trace is not None:
            self._trace.answer_ended(chunk.index, report)
        if chunk.index == 0:
            self._requests.prompt_length.observe(report.prompt_tokens)
        if report.output_tokens > 1:
            self._requests.tpot.observe(decode_s / (report.output_tokens - 1))


class EngineCollector(Collector):
    """Presents the requests' and the scheduler's own counters; ``stats`` is set before each
    scrape."""

    def __init__(self, requests: RequestStats, recent: RecentCounters, page_size: int) -> None:
        self._requests = requests
        self._recent = recent
        self.stats: SchedulerStats | None = None
        self._page_size = page_size

    def collect(self) -> Iterator[Family]:
        yield from _families(self._requests)
        stats = self.stats
        if stats is None:
            return
        yield GaugeMetricFamily(
            "radixrt_generation_tokens_per_second",
            "Tokens generated in the last seconds.",
            self._recent.rates(max_age_s=math.inf).generated_tokens_per_s or 0.0,
        )
        yield from _families(stats.structured)
        if not stats.replicas:
            yield from self._scheduler_families(stats)
            return
        of_replicas = {
            replica: list(self._scheduler_families(one)) for replica, one in stats.replicas.items()
        }
        for families in zip(*of_replicas.values(), strict=True):
            for replica, family in zip(of_replicas, families, strict=True):
                family.samples = [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
            first, *others = families
            first.samples += [sample for family in others for sample in family.samples]
            yield first

    def _scheduler_families(self, stats: SchedulerStats) -> Iterator[Family]:
        hit_rate = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
        yield GaugeMetricFamily(
            "radixrt_cache_hit_rate", "Cached share of all prompt tokens since start.", hit_rate
        )
        used_pages = stats.pages_total - stats.pages_free - stats.pages_evictable
        yield GaugeMetricFamily(
            "radixrt_kv_cache_usage",
            "Share of the KV pool that running sequences and leases hold.",
            used_pages / stats.pages_total if stats.pages_total else 0.0,
        )
        yield GaugeMetricFamily(
            "radixrt_kv_used_tokens",
            "Tokens of the KV pool that running sequences and leases hold.",
            used_pages * self._page_size,
        )
        ended = stats.finished + stats.aborted + stats.refused
        yield CounterMetricFamily(
            "radixrt_received_sequences",
            "Sequences that reached the scheduler.",
            ended + stats.running + stats.waiting,
        )
        yield from _families(stats)


def _families(struct: msgspec.Struct) -> Iterator[Family]:
    for field, metric in _METRICS[type(struct)]:
        name = f"radixrt_{metric.name or field}"
        value = getattr(struct, field)
        if metric.label:
            yield _labelled(metric, name, value)
        else:
            yield _family(metric.kind, name, metric.text, value)


def _metrics_of(struct: type[msgspec.Struct]) -> list[tuple[str, Metric]]:
    """The fields of a struct that are declared as metrics."""
    hints = get_type_hints(struct, include_extras=True)
    declared = ((field, getattr(hint, "__metadata__", ())) for field, hint in hints.items())
    return [(field, one) for field, every in declared for one in every if isinstance(one, Metric)]


_STRUCTS: tuple[type[msgspec.Struct], ...] = (RequestStats, SchedulerStats, StructuredStats)
_METRICS = {struct: _metrics_of(struct) for struct in _STRUCTS}


def _family(kind: str, name: str, text: str, value: Any) -> Family:
    if kind == "histogram":
        return _histogram(name, text, value)
    family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    return family(name, text, value)


def _labelled(metric: Metric, name: str, values: dict[str, int | float]) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(name, metric.text, labels=[metric.label])
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _histogram(name: str, text: str, snapshot: TimeHistogram) -> HistogramMetricFamily:
    bounds = [*(str(bound) for bound in snapshot.bounds), "+Inf"]
    cumulative = list(itertools.accumulate(snapshot.counts))
    buckets = list(zip(bounds, cumulative, strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=snapshot.total)
