"""Counters, gauges and histograms of an engine, each declared with its metric on ``/metrics``."""

from bisect import bisect_left
from functools import partial
from typing import Annotated, Literal, NamedTuple

import msgspec

from radixrt.messages.steps import DRAFTERS


class Metric(NamedTuple):
    """How ``/metrics`` shows a field."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    name: str = ""
    """The name after ``radixrt_``; "": the field's name."""
    label: str = ""
    """Name of the label by whose values the field is a dictionary; "": it is a number."""


counter, gauge, histogram = (
    partial(Metric, "counter"),
    partial(Metric, "gauge"),
    partial(Metric, "histogram"),
)


class TimeHistogram(msgspec.Struct):
    """A Prometheus-style histogram: ``counts[i]`` observations ≤ ``bounds[i]``, not cumulative; the
    last entry of counts is the number of observations above all bounds."""

    bounds: list[float]
    counts: list[int]
    total: float = 0.0

    @staticmethod
    def empty(bounds: list[float]) -> "TimeHistogram":
        return TimeHistogram(bounds, [0] * (len(bounds) + 1))

    def observe(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times


_TTFT_BOUNDS = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
_ITL_BOUNDS = [0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0]
_E2E_BOUNDS = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0]
_TOKEN_BOUNDS = [float(factor * 10**power) for power in range(6) for factor in (1, 2, 5)]


def _empty(bounds: list[float]) -> TimeHistogram:
    return msgspec.field(default_factory=lambda: TimeHistogram.empty(bounds))


class RequestStats(msgspec.Struct, kw_only=True):
    """Latencies and lengths of requests since start, as the api process measures them."""

    ttft: Annotated[
        TimeHistogram,
        histogram("From a request's arrival to its first token.", "time_to_first_token_seconds"),
    ] = _empty(_TTFT_BOUNDS)
    itl: Annotated[
        TimeHistogram,
        histogram("Between two tokens of a streamed answer.", "inter_token_latency_seconds"),
    ] = _empty(_ITL_BOUNDS)
    tpot: Annotated[
        TimeHistogram,
        histogram(
            "Mean time of an answer's tokens after the first.", "time_per_output_token_seconds"
        ),
    ] = _empty(_ITL_BOUNDS)
    e2e: Annotated[
        TimeHistogram,
        histogram(
            "From a request's arrival to the last token of an answer.",
            "e2e_request_latency_seconds",
        ),
    ] = _empty(_E2E_BOUNDS)
    queue_time: Annotated[
        TimeHistogram,
        histogram(
            "From an answer's arrival to its first chunk of prefill.", "request_queue_time_seconds"
        ),
    ] = _empty(_E2E_BOUNDS)
    prefill_time: Annotated[
        TimeHistogram,
        histogram(
            "From an answer's first chunk of prefill to its first token.",
            "request_prefill_time_seconds",
        ),
    ] = _empty(_E2E_BOUNDS)
    decode_time: Annotated[
        TimeHistogram,
        histogram("From an answer's first token to its last.", "request_decode_time_seconds"),
    ] = _empty(_E2E_BOUNDS)
    prompt_length: Annotated[
        TimeHistogram, histogram("Tokens of a prompt.", "request_prompt_tokens")
    ] = _empty(_TOKEN_BOUNDS)
    answer_length: Annotated[
        TimeHistogram, histogram("Tokens of an answer.", "request_generation_tokens")
    ] = _empty(_TOKEN_BOUNDS)


class StructuredStats(msgspec.Struct, kw_only=True):
    """Counters of structured output since start, from the tokenizer process."""

    requests: Annotated[int, counter("Requested constraints.", "structured_requests")] = 0
    refused: Annotated[
        int, counter("Constraints that can't be enforced.", "structured_refused")
    ] = 0
    checks: Annotated[int, counter("Values that were validated.", "structured_checks")] = 0
    retries: Annotated[int, counter("Values that were rolled back.", "structured_retries")] = 0
    exhausted: Annotated[
        int, counter("Requests for which no valid value was found.", "structured_exhausted")
    ] = 0
    """Requests that failed because no valid value was found."""
    violations: Annotated[
        int, counter("Answers that violated their schema: bugs.", "structured_violations")
    ] = 0
    """Finished answers that violated an enforced schema: bugs."""
    cache_hits: Annotated[
        int, counter("Constraints that were compiled already.", "grammar_cache_hits")
    ] = 0
    cache_misses: Annotated[
        int, counter("Constraints that were compiled.", "grammar_cache_misses")
    ] = 0
    helpers_killed: Annotated[
        int, counter("Compiler processes killed at a limit.", "grammar_helpers_killed")
    ] = 0
    """Helper processes that exceeded a limit of time or memory."""


class Counters(msgspec.Struct, kw_only=True):
    """Counters of the scheduler since start."""

    prompt_tokens: Annotated[int, counter("Prompt tokens of admitted sequences.")] = 0
    cached_tokens: Annotated[int, counter("Prompt tokens found in the radix tree.")] = 0
    disk_tokens: Annotated[
        int, counter("Prompt tokens that were read from disk, among the cached ones.")
    ] = 0
    cache_write_tokens: Annotated[
        int, counter("Prompt tokens computed and put into the radix tree.")
    ] = 0
    stateless_tokens: Annotated[
        int, counter("Prompt tokens found in the radix tree without a state of recurrent layers.")
    ] = 0
    """They were computed again."""
    stateless_hits: Annotated[
        int, counter("Sequences with prompt tokens found in the radix tree without a state.")
    ] = 0
    output_tokens: Annotated[int, counter("Tokens generated.", "generated_tokens")] = 0
    replayed_tokens: Annotated[
        int, counter("Tokens of answers that were computed for another, equal request.")
    ] = 0
    idle_tokens: Annotated[
        int, counter("Prompt tokens computed ahead in idle time; in no other count of tokens.")
    ] = 0
    idle_seconds: Annotated[float, counter("Time of steps that computed ahead in idle time.")] = 0.0
    forced_tokens: Annotated[int, counter("Generated tokens that a grammar forced.")] = 0
    """Output tokens that a grammar forced: no forward pass sampled them."""
    drafted_tokens: Annotated[
        dict[str, int], counter("Draft tokens that were verified, by drafter.", label="drafter")
    ] = msgspec.field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    accepted_draft_tokens: Annotated[
        dict[str, int], counter("Draft tokens that were accepted, by drafter.", label="drafter")
    ] = msgspec.field(default_factory=lambda: dict.fromkeys(DRAFTERS, 0))
    """Output tokens that came with the token of a step."""
    deferred_rows: Annotated[
        int,
        counter("Times that a sequence gave no token in a step: its grammar's mask was not ready."),
    ] = 0
    finished: Annotated[int, counter("Sequences that finished.", "finished_sequences")] = 0
    aborted: Annotated[
        int, counter("Sequences dropped: client gone, or request failed.", "aborted_sequences")
    ] = 0
    refused: Annotated[
        int, counter("Sequences that the scheduler refused.", "refused_sequences")
    ] = 0
    retractions: Annotated[int, counter("Sequences retracted for lack of memory.")] = 0
    steps: Annotated[int, counter("Steps of the worker.")] = 0
    step_seconds: Annotated[TimeHistogram, histogram("Time of a step on the worker.")]
    plan_seconds: Annotated[TimeHistogram, histogram("Time the scheduler took to plan a step.")]
    forward_seconds: Annotated[float, counter("Time in the model's forward passes.")] = 0.0
    """The part of step_seconds in the model's forward passes; all steps together."""
    wait_seconds: Annotated[
        float, counter("Worker's waits for plans while busy.", "worker_wait_seconds")
    ] = 0.0
    """Time that the worker waited for plans although there was work; all steps together."""


class TenantStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one tenant since start, and its leases at this moment."""

    page_size: int
    """Tokens in a page."""
    prompt_tokens: int
    """Prompt tokens of admitted sequences."""
    cached_tokens: int
    """Prompt tokens that were in the tree."""
    cache_write_tokens: int
    """Prompt tokens that were computed and put into the tree."""
    output_tokens: int
    hit_rate: float
    """cached_tokens / prompt_tokens; 0 before there are any."""
    leases: int
    pinned_tokens: int
    """Tokens under leases in the tenant's namespace."""


class SchedulerStats(Counters, kw_only=True):
    """The counters, and gauges of this moment."""

    running: Annotated[int, gauge("Sequences in the running batch.", "running_requests")]
    waiting: Annotated[int, gauge("Sequences in the waiting queue.", "queued_requests")]
    queued_prefill_s: Annotated[
        float,
        gauge(
            "Seconds until all prompts so far are computed, by forecast.", "queued_prefill_seconds"
        ),
    ] = 0.0
    """The load as the router gets it; autoscalers go by it."""
    evicted_pages: Annotated[int, counter("Pages evicted from the radix tree.")]
    pages_total: Annotated[int, gauge("Pages of the KV pool.", "kv_pages_capacity")]
    pages_owned: Annotated[int, gauge("Pages held by running sequences alone.", "kv_pages_used")]
    pages_cached: Annotated[int, gauge("Pages in the radix tree.", "kv_pages_cached")]
    """Pages in the tree, locked or not."""
    pages_evictable: Annotated[
        int, gauge("Evictable pages of the radix tree.", "kv_pages_evictable")
    ]
    pages_free: Annotated[int, gauge("Free pages.", "kv_pages_free")]
    pages_pinned: Annotated[int, gauge("Pages in the radix tree under a lease.", "kv_pages_pinned")]
    leases: Annotated[int, gauge("Active leases.", "cache_leases")]
    leases_broken: Annotated[int, counter("Leases broken before their end.", "cache_leases_broken")]
    """Since start, broken before their end because a sequence lacked pages."""
    disk_pages: Annotated[int, gauge("KV pages on disk.", "kv_pages_on_disk")] = 0
    disk_pages_read: Annotated[int, counter("KV pages read from disk.")] = 0
    disk_pages_written: Annotated[int, counter("KV pages written to disk.")] = 0
    disk_pages_dropped: Annotated[
        int, counter("KV pages dropped from disk, for others or as damaged.")
    ] = 0
    disk_pages_damaged: Annotated[
        int, counter("KV pages on disk that were not what was written, and computed again.")
    ] = 0
    disk_stopped: Annotated[int, gauge("1 if --cache-dir is not written any more.")] = 0
    """The disk is full or broken."""
    sessions: Annotated[int, gauge("Sessions named by hints and not ended.", "cache_sessions")]
    kept_states: Annotated[
        int, gauge("States of recurrent layers that are kept beside the KV.", "kept_states")
    ]
    kept_state_bytes: Annotated[int, gauge("Memory of the states that are kept.")] = 0
    grammars: Annotated[int, gauge("Grammars that the worker holds.", "grammars_loaded")]
    images: Annotated[int, gauge("Images whose features the worker holds.", "images_loaded")] = 0
    images_computed: Annotated[int, counter("Images on which the vision tower was run.")] = 0
    tree_nodes: Annotated[int, gauge("Nodes of the radix tree.", "radix_tree_nodes")]
    expert_tokens: Annotated[
        dict[str, int],
        counter("Tokens of each expert of a mixture, over all layers.", label="expert"),
    ] = {}
    """Empty without ``--expert-metrics``, as the next."""
    expert_imbalance: Annotated[
        dict[str, float],
        gauge("Tokens of a layer's busiest expert over the mean of its experts.", label="layer"),
    ] = {}
    """Since start. The layers with experts are numbered from 0."""
    malformed_frames: Annotated[int, counter("Frames that a process could not decode.")]
    """Frames that the api, the tokenizer process or the scheduler could not read; the worker only
    logs its own."""
    request_log_dropped: Annotated[
        int, counter("Lines of the request log that were not written.")
    ] = 0
    kv_events: Annotated[int, counter("Events published on the KV-event stream.")] = 0
    kv_event_replays: Annotated[int, counter("Replays answered from the buffer.")] = 0
    """Replay requests answered with the missed batches."""
    kv_event_snapshots: Annotated[int, counter("Replays answered with a snapshot.")] = 0
    """Replay requests for batches that are no longer kept, answered with all blocks."""
    structured: StructuredStats = msgspec.field(default_factory=StructuredStats)
    """Filled in by the tokenizer process."""
    replicas: dict[str, "SchedulerStats"] = {}
    """The counters of each replica by its number, if there are several; the other fields are their
    sums."""
