"""The results of one replay: one row of the table."""

from dataclasses import dataclass

from radixrt.bench.cache.bounds import belady, infinite_cache
from radixrt.bench.cache.replay import Replay, Setup
from radixrt.bench.cache.trace import BLOCK_TOKENS, Trace
from radixrt.bench.report import Percentiles

LINEAR_FLOPS_PER_TOKEN = 2 * 8.03e9
"""Llama 3 8B's: two for each parameter."""

ATTENTION_FLOPS_PER_PAIR = 4 * 32 * 4096
"""Llama 3 8B's: four for each pair of positions, layer and hidden dimension (queries with keys,
weights with values)."""


@dataclass(frozen=True)
class CacheResult:
    """One trace, one pool, one pair of policies."""

    trace: str
    pool_tokens: int
    eviction_policy: str
    schedule_policy: str
    hints: str
    """Level of the cache hints; after "program", the error of the stated tool times."""
    closed_loop: bool
    hit_percent: float
    """Cached prompt tokens of all prompt tokens."""
    flops_hit_percent: float
    """Prefill FLOPs saved of all prefill FLOPs, for the shape of Llama 3 8B: a late token costs
    more than an early one."""
    infinite_percent: float
    """Hit rate of a cache that never evicts, in tokens."""
    belady_percent: float
    """Hit rate of Belady on leaves for the order in which this replay admitted, in tokens."""
    ttft_ms: Percentiles | None
    retractions: int
    evicted_tokens: int
    refused: int
    duration_s: float
    """Seconds on the virtual clock."""
    steps: int
    replay_s: float
    """CPU seconds that the replay took."""
    replicas: int
    router: str
    """"": one replica."""
    busiest: float
    """Prompt tokens computed by the replica that computed most, as a multiple of the mean."""
    disk_percent: float = 0.0
    """Prompt tokens read from disk of all prompt tokens; they are among the cached ones."""
    written_tokens: int = 0
    """Tokens whose pages were written to disk."""
    lru_gap_closed_percent: float | None = None
    """(hits - hits of LRU) / (Belady for LRU's order - hits of LRU), where ``lru`` was replayed
    too."""


def evaluate(trace: Trace, run: Replay, replay_s: float) -> CacheResult:
    """Work out one row."""
    admitted = [trace.requests[number] for number in run.order]
    total = sum(request.input_tokens for request in admitted) or 1
    bound_pages = run.setup.pool_tokens // BLOCK_TOKENS
    flops = sum(prefill_flops(request.input_tokens) for request in admitted) or 1.0
    saved = sum(prefill_flops(run.cached_tokens[number]) for number in run.order)
    return CacheResult(
        trace=trace.name,
        pool_tokens=run.setup.pool_tokens,
        eviction_policy=run.setup.eviction_policy,
        schedule_policy=run.setup.schedule_policy,
        hints=_hints(run.setup),
        closed_loop=run.setup.closed_loop,
        hit_percent=100 * sum(run.cached_tokens) / total,
        flops_hit_percent=100 * saved / flops,
        infinite_percent=100 * sum(infinite_cache(admitted)) / total,
        belady_percent=100 * sum(belady(admitted, bound_pages)) / total,
        ttft_ms=Percentiles.from_seconds([ttft for ttft in run.ttft_s if ttft is not None]),
        retractions=run.retractions,
        evicted_tokens=run.evicted_tokens,
        refused=len(trace.requests) - len(admitted),
        duration_s=run.duration_s,
        steps=run.steps,
        replay_s=replay_s,
        replicas=run.setup.replicas,
        router=run.setup.router if run.setup.replicas > 1 else "",
        disk_percent=100 * run.disk_tokens / total,
        written_tokens=run.written_tokens,
        busiest=max(run.computed_tokens) * run.setup.replicas / (sum(run.computed_tokens) or 1),
    )


def _hints(setup: Setup) -> str:
    return f"program {setup.hint_error:g}" if setup.hints == "program" else setup.hints


def prefill_flops(num_tokens: int) -> float:
    """FLOPs to compute the first ``num_tokens`` tokens of a prompt."""
    pairs = num_tokens * (num_tokens + 1) / 2
    return LINEAR_FLOPS_PER_TOKEN * num_tokens + ATTENTION_FLOPS_PER_PAIR * pairs


def gap_closed(result: CacheResult, lru: CacheResult) -> float | None:
    """Percent of the way from LRU to the optimum of the same order; None where LRU is the
    optimum."""
    gap = lru.belady_percent - lru.hit_percent
    return 100 * (result.hit_percent - lru.hit_percent) / gap if gap > 0.01 else None
