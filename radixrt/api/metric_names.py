"""Names, labels and units of ``/metrics``: the label ``model_name``, and the names of vLLM and
SGLang for dashboards and routers."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from radixrt.base.settings.setting import MetricsPeerName


class _Source(NamedTuple):
    """The metric of radixrt behind a peer's metric."""

    name: str
    """The name after ``radixrt_``, without ``_total``."""
    renamed: Mapping[str, str] = {}
    """Labels under their new names."""
    labels: Mapping[str, str] = {}
    """Further labels."""


_LATENCIES = {
    name: _Source(name)
    for name in (
        "e2e_request_latency_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
    )
}

_OF_PEERS: dict[MetricsPeerName, dict[str, _Source]] = {
    "vllm": {
        **_LATENCIES,
        "request_time_per_output_token_seconds": _Source("time_per_output_token_seconds"),
        "time_per_output_token_seconds": _Source("inter_token_latency_seconds"),
        "request_queue_time_seconds": _Source("request_queue_time_seconds"),
        "request_prefill_time_seconds": _Source("request_prefill_time_seconds"),
        "request_decode_time_seconds": _Source("request_decode_time_seconds"),
        "request_prompt_tokens": _Source("request_prompt_tokens"),
        "request_generation_tokens": _Source("request_generation_tokens"),
        "request_max_num_generation_tokens": _Source("request_generation_tokens"),
        "prompt_tokens": _Source("prompt_tokens"),
        "generation_tokens": _Source("generated_tokens"),
        "request_success": _Source("answers", {"outcome": "finished_reason"}),
        "num_requests_running": _Source("running_requests"),
        "num_requests_waiting": _Source("queued_requests"),
        "kv_cache_usage_perc": _Source("kv_cache_usage"),
        "gpu_cache_usage_perc": _Source("kv_cache_usage"),
        "prefix_cache_queries": _Source("prompt_tokens"),
        "prefix_cache_hits": _Source("cached_tokens"),
        "gpu_prefix_cache_queries": _Source("prompt_tokens"),
        "gpu_prefix_cache_hits": _Source("cached_tokens"),
        "num_preemptions": _Source("retractions"),
    },
    "sglang": {
        **_LATENCIES,
        "time_per_output_token_seconds": _Source("time_per_output_token_seconds"),
        "queue_time_seconds": _Source("request_queue_time_seconds"),
        "prompt_tokens": _Source("prompt_tokens"),
        "generation_tokens": _Source("generated_tokens"),
        "cached_tokens": _Source("cached_tokens", labels={"cache_source": "device"}),
        "num_requests": _Source("received_sequences"),
        "num_aborted_requests": _Source("aborted_sequences"),
        "num_running_reqs": _Source("running_requests"),
        "num_queue_reqs": _Source("queued_requests"),
        "num_used_tokens": _Source("kv_used_tokens"),
        "token_usage": _Source("kv_cache_usage"),
        "cache_hit_rate": _Source("cache_hit_rate"),
        "gen_throughput": _Source("generation_tokens_per_second"),
    },
}
"""Peer's name after its prefix, without ``_total``, to ours. Both as their dashboards and routers
read them."""

_LABELS: dict[MetricsPeerName, Mapping[str, str]] = {"vllm": {"engine": "0"}, "sglang": {}}


class NamedMetrics(Collector):
    """The metrics of a registry with the label ``model_name``, and under the names of peers."""

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        peers: tuple[MetricsPeerName, ...],
        cache_config: Mapping[str, str],
    ) -> None:
        """
        Args:
            cache_config: labels of ``vllm:cache_config_info``, such as ``block_size``.
        """
        self._registry = registry
        self._labels = {"model_name": model_name}
        self._peers = peers
        self._cache_config = cache_config

    def collect(self) -> Iterator[Family]:
        families = {family.name: family for family in self._registry.collect()}
        for family in families.values():
            yield _relabelled(family, family.name, {}, self._labels)
        for peer in self._peers:
            labels = {**self._labels, **_LABELS[peer]}
            for name, source in _OF_PEERS[peer].items():
                family_of_ours = families.get(f"radixrt_{source.name}")
                if family_of_ours is not None:  # the scheduler's are absent if it did not answer
                    every = {**labels, **source.labels}
                    yield _relabelled(family_of_ours, f"{peer}:{name}", source.renamed, every)
        if "vllm" in self._peers:
            info = {**self._labels, **_LABELS["vllm"], **self._cache_config}
            family = GaugeMetricFamily(
                "vllm:cache_config_info", "Sizes of the KV cache.", labels=list(info)
            )
            family.add_metric(list(info.values()), 1)
            yield family


def _relabelled(
    family: Family, name: str, renamed: Mapping[str, str], labels: Mapping[str, str]
) -> Family:
    """A copy of ``family`` under another name, with further labels."""
    copy = Family(name, family.documentation, family.type)
    for sample in family.samples:
        old = {renamed.get(label, label): value for label, value in sample.labels.items()}
        suffix = sample.name.removeprefix(family.name)
        copy.samples.append(Sample(name + suffix, {**labels, **old}, sample.value))
    return copy
