"""``/metrics``: latencies measured in the api process, and the scheduler's counters, fetched at each scrape."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from radixrt.client.engine_client import EngineClient
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.ids import num_ids
from radixrt.messages.stats import SchedulerStats, StructuredStats, TimeHistogram

log = logging.getLogger(__name__)

_TTFT_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_ITL_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_E2E_BOUNDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

STATS_TIMEOUT_S = 5


class Metrics:
    """The counters of one api process."""

    def __init__(self) -> None:
        disable_created_metrics()  # the library's: a time stamp beside each metric, used by nobody
        self.registry = CollectorRegistry()
        self.engine = EngineCollector()
        self.registry.register(self.engine)
        self.ttft = self._histogram(
            "time_to_first_token", "From a request's arrival to its first token.", _TTFT_BOUNDS
        )
        self.itl = self._histogram(
            "inter_token_latency", "Between two tokens of a streamed answer.", _ITL_BOUNDS
        )
        self.tpot = self._histogram(
            "time_per_output_token", "Mean time of an answer's tokens after the first.", _ITL_BOUNDS
        )
        self.e2e = self._histogram(
            "e2e_request_latency",
            "From a request's arrival to the last token of an answer.",
            _E2E_BOUNDS,
        )
        self.answers = Counter(
            "radixrt_answers",
            "Answers by how they ended: stop, length, abort; HTTP requests that were cut short: error, client_left.",
            ["outcome"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(f"radixrt_{name}_seconds", text, registry=self.registry, buckets=bounds)

    async def scrape(self, client: EngineClient) -> bytes:
        """All metrics as Prometheus reads them; those of the scheduler are left out if it does not reply in time."""
        try:
            self.engine.stats = await asyncio.wait_for(client.stats(), STATS_TIMEOUT_S)
        except TimeoutError:
            log.warning("The scheduler did not send its counters within %d s.", STATS_TIMEOUT_S)
            self.engine.stats = None
        return generate_latest(self.registry)


class AnswerTimer:
    """Observes the chunks of one request as they come in."""

    def __init__(self, metrics: Metrics, streams: bool) -> None:
        self._metrics = metrics
        self._streams = streams
        self._began = time.perf_counter()
        self._last: dict[int, float] = {}
        """Time of each answer's last chunk."""

    def observe(self, chunk: AnswerChunk) -> None:
        now = time.perf_counter()
        num_new = num_ids(chunk.token_ids)
        last = self._last.get(chunk.index)
        if last is not None:
            for _ in range(num_new):
                self._metrics.itl.observe((now - last) / num_new)
        elif self._streams:
            self._metrics.ttft.observe(now - self._began)
        self._last[chunk.index] = now
        if chunk.finish_reason is not None:
            self._observe_end(chunk, now)

    def _observe_end(self, chunk: AnswerChunk, now: float) -> None:
        self._metrics.e2e.observe(now - self._began)
        self._metrics.answers.labels(chunk.finish_reason).inc()
        times, num_tokens = chunk.report.times, chunk.report.output_tokens
        first_s = times.queued_s + times.prefill_s
        if not self._streams:
            self._metrics.ttft.observe(first_s)
        if num_tokens > 1:
            decode_s = max(0.0, times.total_s - first_s)
            self._metrics.tpot.observe(decode_s / (num_tokens - 1))


class EngineCollector(Collector):
    """Presents the scheduler's own counters; set ``stats`` before each scrape."""

    def __init__(self) -> None:
        self.stats: SchedulerStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        if stats is None:
            return
        for name, text, value in _gauges(stats):
            yield GaugeMetricFamily(f"radixrt_{name}", text, value=value)
        for name, text, count in _counters(stats):
            yield CounterMetricFamily(f"radixrt_{name}", text, value=count)
        yield _histogram(
            "radixrt_step_seconds", "Time of a step on the worker.", stats.step_seconds
        )
        yield _histogram(
            "radixrt_plan_seconds", "Time the scheduler took to plan a step.", stats.plan_seconds
        )


def _gauges(stats: SchedulerStats) -> list[tuple[str, str, float]]:
    hit_rate = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    return [
        ("running_requests", "Sequences in the running batch.", stats.running),
        ("queued_requests", "Sequences that wait.", stats.waiting),
        ("cache_hit_rate", "Cached share of all prompt tokens since start.", hit_rate),
        ("kv_pages_capacity", "Pages of the KV pool.", stats.pages_total),
        ("kv_pages_used", "Pages held by running sequences alone.", stats.pages_owned),
        ("kv_pages_cached", "Pages in the radix tree.", stats.pages_cached),
        ("kv_pages_evictable", "Pages in the radix tree in nobody's use.", stats.pages_evictable),
        ("kv_pages_free", "Pages that hold nothing.", stats.pages_free),
        ("kv_pages_pinned", "Pages in the radix tree under a lease.", stats.pages_pinned),
        ("cache_leases", "Leases that hold.", stats.leases),
        ("cache_sessions", "Sessions named by hints and not ended.", stats.sessions),
        ("radix_tree_nodes", "Nodes of the radix tree.", stats.tree_nodes),
        ("grammars_loaded", "Grammars that the worker holds.", stats.grammars),
    ]


def _counters(stats: SchedulerStats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "Prompt tokens of admitted sequences.", stats.prompt_tokens),
        ("cached_tokens", "Prompt tokens found in the radix tree.", stats.cached_tokens),
        (
            "cache_write_tokens",
            "Prompt tokens computed and put into the radix tree.",
            stats.cache_write_tokens,
        ),
        ("cache_leases_broken", "Leases given up before their time.", stats.leases_broken),
        ("generated_tokens", "Tokens generated.", stats.output_tokens),
        ("finished_sequences", "Sequences that came to their end.", stats.finished),
        (
            "aborted_sequences",
            "Sequences dropped: client gone, or request failed.",
            stats.aborted,
        ),
        ("refused_sequences", "Sequences that the scheduler did not take.", stats.refused),
        ("retractions", "Sequences set back for lack of memory.", stats.retractions),
        ("evicted_pages", "Pages evicted from the radix tree.", stats.evicted_pages),
        ("steps", "Steps of the worker.", stats.steps),
        ("forward_seconds", "Time in the model's forward passes.", stats.forward_seconds),
        ("worker_wait_seconds", "Worker's waits for plans while busy.", stats.wait_seconds),
        ("malformed_frames", "Frames that the scheduler could not read.", stats.malformed_frames),
        ("request_log_dropped", "Unwritten lines of the log.", stats.request_log_dropped),
        ("forced_tokens", "Tokens that a grammar forced, not sampled.", stats.forced_tokens),
        ("kv_events", "Published on the KV-event stream.", stats.kv_events),
        ("kv_event_replays", "Subscribers helped out with batches.", stats.kv_event_replays),
        ("kv_event_snapshots", "Subscribers helped out with all blocks.", stats.kv_event_snapshots),
        *_structured_counters(stats.structured),
    ]


def _structured_counters(stats: StructuredStats) -> list[tuple[str, str, float]]:
    return [
        ("structured_requests", "Constraints asked for.", stats.requests),
        ("structured_refused", "Constraints that can't be enforced.", stats.refused),
        ("structured_checks", "Values that a validator looked at.", stats.checks),
        ("structured_retries", "Values that were taken back.", stats.retries),
        ("structured_exhausted", "Requests for which no valid value was found.", stats.exhausted),
        ("structured_violations", "Answers that broke their schema: bugs.", stats.violations),
        ("grammar_cache_hits", "Constraints that were compiled already.", stats.cache_hits),
        ("grammar_cache_misses", "Constraints that were compiled.", stats.cache_misses),
        ("grammar_helpers_killed", "Compilers that went over a limit.", stats.helpers_killed),
    ]


def _histogram(name: str, text: str, snapshot: TimeHistogram) -> HistogramMetricFamily:
    bounds = [*(str(bound) for bound in snapshot.bounds), "+Inf"]
    cumulative = list(itertools.accumulate(snapshot.counts))
    buckets = list(zip(bounds, cumulative, strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=snapshot.total)
