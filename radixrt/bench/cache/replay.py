"""Replays a trace through the real scheduler, tree and allocator, with a simulated worker; or
through several, behind a router.

To be quick, the replay works on *symbols*: ``ServiceModel.tokens_per_symbol`` tokens (8 by default)
are one simulated token, so that a block of 512 tokens is 64 symbols, all different from those of
every other block, and a decode step yields 8 tokens of each running sequence. Lengths are rounded
down to whole symbols. Pages keep their size in tokens. The text of a recorded answer is not known,
so its pages are cached and never found again; the next turn's prompt, which holds the answer, is
recorded and is. A client asks for at most ``MAX_ANSWER_TOKENS`` and the answer ends where the
recorded one did. One step is in flight at a time.
"""

import heapq
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from radixrt.base.errors import ConfigError
from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.scheduling import SchedulerSettings
from radixrt.base.settings.setting import EvictionPolicyName
from radixrt.bench.arguments import HintLevel, RouterName
from radixrt.bench.cache.engine import (
    END_OF_ANSWER,
    NO_DISK,
    DiskModel,
    ServiceModel,
    SimulatedEngine,
    VirtualClock,
)
from radixrt.bench.cache.future import look_ahead
from radixrt.bench.cache.routing import RULES, Arrival, RoutingRule
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace, TraceRequest
from radixrt.messages.ids import PackedIds, pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest, TokenBatch
from radixrt.scheduler.limits import SchedulerLimits

MAX_ANSWER_TOKENS = 4096
PREFILL_TOKENS_PER_STEP = 16384


@dataclass(frozen=True)
class Setup:
    """The settings that differ between replays; lengths in tokens."""

    pool_tokens: int
    eviction_policy: EvictionPolicyName = "lru"
    schedule_policy: Any = "fcfs"
    """As in :class:`radixrt.base.config.ServerConfig`."""
    page_size: int = BLOCK_TOKENS
    hints: HintLevel = "none"
    hint_error: float = 0.5
    """See :mod:`radixrt.bench.cache.future`."""
    closed_loop: bool = False
    """A session's next request comes so long after the answer of the last as it was recorded, not
    at its recorded time."""
    max_running: int = 256
    """Maximum of concurrent requests. Their pages are locked: more running requests leave fewer
    pages for the cache."""
    service: ServiceModel = field(default_factory=ServiceModel)
    """The service of all replicas together: each has its part of the rate."""
    replicas: int = 1
    """Each has its part of the pool."""
    router: RouterName = "radixrt"
    disk: DiskModel = NO_DISK
    """Of each replica."""

    @property
    def pages_per_replica(self) -> int:
        return self.pool_tokens // self.page_size // self.replicas

    @property
    def service_per_replica(self) -> ServiceModel:
        rate = self.service.prefill_tokens_per_s / self.replicas
        return replace(self.service, prefill_tokens_per_s=rate)


@dataclass(frozen=True)
class Replay:
    """Results of the requests and of the cache."""

    setup: Setup
    order: list[int]
    """Numbers of the requests, as they were admitted."""
    cached_tokens: list[int]
    """Cached tokens of each request."""
    ttft_s: list[float | None]
    """Time to first token of each request; None if it was refused."""
    duration_s: float
    """Seconds on the virtual clock."""
    retractions: int
    evicted_tokens: int
    steps: int
    replica_of: list[int]
    """Replica of each request."""
    computed_tokens: list[int]
    """Prompt tokens, by replica."""
    disk_tokens: int
    """Prompt tokens that were read from disk."""
    written_tokens: int
    """Tokens whose pages were written to disk."""


def replay(trace: Trace, setup: Setup) -> Replay:
    """Send a trace through a scheduler.

    Raises:
        ConfigError: page size and granularity do not fit together.
    """
    return _Run(trace, setup).run()


class _Run:
    def __init__(self, trace: Trace, setup: Setup) -> None:
        self._setup, self._trace = setup, trace
        self._symbol = setup.service.tokens_per_symbol
        self._clock = VirtualClock()
        self._limits = scheduler_limits(trace, setup)
        self._engines = [
            SimulatedEngine(
                self._limits,
                self._clock,
                setup.service_per_replica,
                lambda number, delivered: self._answer_length(trace.requests[number]) - delivered,
                is_routed=setup.replicas > 1,
                disk=setup.disk,
            )
            for _ in range(setup.replicas)
        ]
        rule = RULES[setup.router] if setup.replicas > 1 else RoutingRule
        self._rule = rule(setup.replicas, self._limits.page_size, self._clock)
        self._future = look_ahead(trace, setup.hints, setup.hint_error, setup.service.decode_step_s)
        self._coming = self._first_arrivals()
        self._order: list[int] = []
        self._cached = [0] * len(trace.requests)
        self._ttft: list[float | None] = [None] * len(trace.requests)
        self._arrival = [0.0] * len(trace.requests)
        self._replica_of = [0] * len(trace.requests)

    def run(self) -> Replay:
        for number, engine in enumerate(self._engines):
            self._rule.report(number, engine)
        while self._advance():
            ended = [engine for engine in self._engines if engine.ends_at <= self._clock.now]
            for engine in ended:
                self._record(engine.end_step())
            self._arrive()
            for number, engine in enumerate(self._engines):
                if engine.start_step() or engine in ended:
                    self._rule.report(number, engine)
                self._order += engine.take_admitted()
        counters = [engine.scheduler.state.counters for engine in self._engines]
        evicted = sum(engine.scheduler.state.kv.evicted_pages for engine in self._engines)
        return Replay(
            setup=self._setup,
            order=list(dict.fromkeys(self._order)),
            cached_tokens=self._cached,
            ttft_s=self._ttft,
            duration_s=self._clock.now,
            retractions=sum(counter.retractions for counter in counters),
            evicted_tokens=evicted * self._setup.page_size,
            steps=sum(counter.steps for counter in counters),
            replica_of=self._replica_of,
            disk_tokens=sum(counter.disk_tokens for counter in counters) * self._symbol,
            written_tokens=self._setup.page_size
            * sum(engine.disk.written_pages for engine in self._engines),
            computed_tokens=[engine.prefill_symbols * self._symbol for engine in self._engines],
        )

    def _first_arrivals(self) -> list[tuple[float, int]]:
        """A heap of times and requests: all requests; in a closed loop, those that wait for no
        answer."""
        follows = {after for after in self._future.following if after is not None}
        return [
            (request.arrival_s, number)
            for number, request in enumerate(self._trace.requests)
            if not (self._setup.closed_loop and number in follows)
        ]

    def _advance(self) -> bool:
        """Let the clock show the end of the next step, or the next arrival; False: there is
        neither."""
        times = [engine.ends_at for engine in self._engines]
        times += [self._coming[0][0]] if self._coming else []
        now = min(times)
        if now == math.inf:
            return False
        self._clock.now = max(self._clock.now, now)
        return True

    def _arrive(self) -> None:
        """Send the requests that have arrived to their replicas."""
        while self._coming and self._coming[0][0] <= self._clock.now:
            arrival, number = heapq.heappop(self._coming)
            self._arrival[number] = arrival
            request = self._request(number)
            session = self._trace.requests[number].session
            replica = self._replica_of[number] = self._rule.choose(
                Arrival(number, request, session)
            )
            self._engines[replica].receive(request)

    def _request(self, number: int) -> SequenceRequest:
        recorded = self._trace.requests[number]
        num_symbols = max(1, recorded.input_tokens // self._symbol)
        room = self._limits.num_pages * self._limits.page_size - num_symbols
        sampling = SamplingParams(
            max_tokens=max(
                self._answer_length(recorded), min(MAX_ANSWER_TOKENS // self._symbol, room)
            )
        )
        return SequenceRequest(
            seq_id=number,
            token_ids=self._prompt(recorded, num_symbols),
            options=RequestOptions(sampling=sampling, cache_hints=self._future.hints[number]),
        )

    def _prompt(self, recorded: TraceRequest, num_symbols: int) -> PackedIds:
        per_block = BLOCK_TOKENS // self._symbol
        ids = recorded.blocks[:, None] * per_block + np.arange(per_block)
        return pack_ids(ids.ravel()[:num_symbols])

    def _answer_length(self, recorded: TraceRequest) -> int:
        return max(1, recorded.output_tokens // self._symbol)

    def _record(self, batch: TokenBatch) -> None:
        for number, output in batch.outputs.items():
            if output.started is not None:
                self._cached[number] = output.started.cached_tokens * self._symbol
                self._ttft[number] = self._clock.now - self._arrival[number]
            if output.finished is not None:
                self._rule.finished(number)
                self._go_on_after(number)

    def _go_on_after(self, number: int) -> None:
        """An answer is complete: its session ends, or sends its next request after a pause."""
        if self._future.is_last_of_session(number):
            for engine in self._engines:
                engine.scheduler.release_session(self._future.hints[number].session)
        after = self._future.following[number]
        if self._setup.closed_loop and after is not None:
            arrival = self._clock.now + self._future.pause_s[number]
            heapq.heappush(self._coming, (arrival, after))


def scheduler_limits(trace: Trace, setup: Setup) -> SchedulerLimits:
    """The limits of a scheduler that works on symbols.

    Raises:
        ConfigError: page size and granularity do not fit together.
    """
    symbol = setup.service.tokens_per_symbol
    if BLOCK_TOKENS % symbol or setup.page_size % symbol:
        raise ConfigError(
            f"--tokens-per-symbol {symbol} must divide both {BLOCK_TOKENS} and --page-size {setup.page_size}."
        )
    longest = max(
        request.input_tokens + max(request.output_tokens, MAX_ANSWER_TOKENS)
        for request in trace.requests
    )
    return SchedulerLimits(
        settings=SchedulerSettings(
            max_running_requests=setup.max_running,
            max_queued_requests=len(trace.requests),
            max_queue_seconds=0,
            max_step_ms=0,
            chunked_prefill_size=PREFILL_TOKENS_PER_STEP // symbol,
            schedule_policy=setup.schedule_policy,
            eviction_policy=setup.eviction_policy,
        ),
        max_prefill_tokens=PREFILL_TOKENS_PER_STEP // symbol,
        context_length=longest // symbol + 2,
        num_pages=setup.pages_per_replica,
        page_size=setup.page_size // symbol,
        eos_token_ids=(END_OF_ANSWER,),
    )
