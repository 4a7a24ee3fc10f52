"""``/metrics``: the label ``model_name``, and every series that the dashboards and routers of vLLM
and SGLang read.

The series are those of vLLM's and SGLang's published Grafana dashboards, of the vLLM production
stack, and of the endpoint pickers of Kubernetes gateways.
"""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from tests.api.conftest import RunningServer, StartServer
from tests.servers import samples

VLLM_HISTOGRAMS = (
    "e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens",
)  # fmt: skip
VLLM_VALUES = (
    "prompt_tokens_total", "generation_tokens_total", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "gpu_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total", "gpu_prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total", "num_preemptions_total",
)  # fmt: skip
SGLANG_HISTOGRAMS = (
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
)
SGLANG_VALUES = (
    "num_running_reqs", "num_queue_reqs", "gen_throughput", "cache_hit_rate", "token_usage", "num_used_tokens",
    "prompt_tokens_total", "generation_tokens_total", "num_requests_total", "num_aborted_requests_total",
)  # fmt: skip


@pytest.fixture
def used_server(start_server: StartServer) -> RunningServer:
    server = start_server(metrics_compat="vllm, sglang")
    server.answer_with("Hello world")
    list(server.openai.completions.create(model="tiny", prompt="hi", stream=True))
    return server


def names_in(text: str) -> set[str]:
    """The sample names that have the label ``model_name="tiny"``."""
    return {
        sample.name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model_name") == "tiny"
    }


def test_every_series_of_the_peers_dashboards_is_there(used_server: RunningServer) -> None:
    text = used_server.http.get("/metrics").text
    wanted = {f"vllm:{name}" for name in VLLM_VALUES} | {f"sglang:{name}" for name in SGLANG_VALUES}
    for prefix, histograms in (("vllm", VLLM_HISTOGRAMS), ("sglang", SGLANG_HISTOGRAMS)):
        wanted |= {
            f"{prefix}:{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")
        }
    assert not wanted - names_in(text)
    values = samples(text)
    engine = ("engine", "0")
    assert values["vllm:request_success_total", (engine, ("finished_reason", "stop"))] == 1
    assert values["sglang:cached_tokens_total", (("cache_source", "device"),)] > 0
    info = next(labels for name, labels in values if name == "vllm:cache_config_info")
    assert {"block_size", "num_gpu_blocks", "enable_prefix_caching"} <= {label for label, _ in info}


def test_a_peers_metric_has_the_value_of_ours(used_server: RunningServer) -> None:
    values = samples(used_server.http.get("/metrics").text)
    engine = (("engine", "0"),)
    for theirs, ours in (
        ("time_to_first_token_seconds_count", "time_to_first_token_seconds_count"),
        ("generation_tokens_total", "generated_tokens_total"),
        ("prefix_cache_hits_total", "cached_tokens_total"),
        ("kv_cache_usage_perc", "kv_cache_usage"),
        ("num_requests_waiting", "queued_requests"),
    ):
        assert values[f"vllm:{theirs}", engine] == values[f"radixrt_{ours}", ()], theirs
    assert 0 <= values["vllm:kv_cache_usage_perc", engine] <= 1


def test_the_names_of_peers_are_off_by_default(server: RunningServer) -> None:
    assert not re.search("^(vllm|sglang):", server.http.get("/metrics").text, re.MULTILINE)


def test_openmetrics_has_the_names_of_peers_too(used_server: RunningServer) -> None:
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    text = used_server.http.get("/metrics", headers=headers).text
    assert text.endswith("# EOF\n") and "vllm:num_requests_running" in text


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ConfigError, match="tgi is not a valid name: write vllm or sglang"):
        ServerConfig(metrics_compat="vllm,tgi").validate()
