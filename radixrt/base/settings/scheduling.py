"""Declares the settings that the scheduler plans by."""

from dataclasses import dataclass
from typing import Literal

from radixrt.base.settings.setting import EvictionPolicyName, SchedulePolicyName, section

_cache, _scheduling = section("KV cache"), section("Scheduling")


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """The settings that the scheduler plans by."""

    eviction_policy: EvictionPolicyName = _cache(
        "value",
        "KV that is evicted first: lru the least recently used; value as lru, but KV that seldom returns "
        "before it; fifo the first computed; priority that of the lowest priority.",
    )
    max_pinned_fraction: float = _cache(
        0.5,
        "Share of the KV pool that clients may pin at a time (POST /v1/cache/pin).",
        within=(0, 1),
    )
    disable_radix_cache: bool = _cache(False, "Share no prefixes between requests.")
    disable_shared_answers: bool = _cache(
        False,
        "Compute every answer, also where an equal request runs or has ended (docs/caching.md).",
    )
    cache_dir: str | None = _cache(
        None,
        "Folder in which KV outlives the server (docs/guides/kept_kv.md); only on a CPU.",
        metavar="DIR",
    )
    cache_dir_gb: float = _cache(
        10.0, "Most disk space of --cache-dir, in GB.", within=(0.001, None)
    )
    cache_bundle: str | None = _cache(
        None,
        "Bundle whose KV is added to --cache-dir at the start.",
        metavar="FILE",
    )
    shared_kv_pool: Literal["auto", "on", "off"] = _cache(
        "auto",
        "Keep the KV pool in shared memory, where it outlives a dead worker; auto: if that has "
        "pages of 2 MiB. Only on a CPU.",
    )

    idle_share: float = _scheduling(
        0.5,
        "Share of an idle server's time for expected prompts (docs/pieces.md); "
        "0: nothing is computed ahead.",
        within=(0, 1),
    )
    prepare_next_turns: bool = _scheduling(
        False,
        "Compute the beginning of a chat's next turn in idle time, where the template writes "
        "earlier turns in another way (docs/pieces.md).",
    )
    max_running_requests: int | None = _scheduling(
        None,
        "Maximum number of sequences in the running batch; by default 256, and on a GPU one for "
        "each 1,024 tokens of its KV pool, from 256 to 1,024.",
        within=(1, 65536),
    )
    max_queued_requests: int = _scheduling(
        4096,
        "Maximum number of waiting sequences; further requests get status 503 with Retry-After.",
        within=(1, None),
    )
    max_queue_seconds: float = _scheduling(
        30.0,
        "Longest wait in the queue, in seconds: a request that would wait longer, or has, gets "
        "status 503 with Retry-After; 0 is no limit.",
        within=(0, None),
    )
    max_step_ms: float | None = _scheduling(
        None,
        "Longest step, in milliseconds, which sizes prefill chunks; by default the step of the "
        "running answers plus four times that of one, from 15 to 150; 0 is no limit.",
        within=(0, None),
    )
    chunked_prefill_size: int = _scheduling(
        2048, "Maximum number of prompt tokens of one sequence in one step.", within=(1, None)
    )
    schedule_policy: SchedulePolicyName = _scheduling(
        "lpm",
        "Order of the waiting queue: lpm longest prefix match, suf shortest uncached prefill, fcfs "
        "first come first served, priority the smallest priority, then lpm.",
    )
    speculation: Literal["auto", "text", "head", "off"] = _scheduling(
        "auto",
        "Draft tokens from known text, by a head (--draft-model, or the checkpoint's MTP layer), or "
        "both (auto); answers stay the same. Only on a CPU.",
    )
