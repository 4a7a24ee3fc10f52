"""Writes the Grafana dashboard: ``python deploy/monitoring/dashboard.py >
deploy/monitoring/dashboard.json``."""

import json
from typing import Any, NamedTuple

SERVER = 'model_name=~"$model_name",instance=~"$instance"'


class Panel(NamedTuple):
    """One graph."""

    title: str
    unit: str
    """Grafana's name of it."""
    queries: dict[str, str]
    """Legend to expression; ``LABELS`` stands for the chosen servers."""
    description: str


def rate(counter: str) -> str:
    return f"sum(rate(radixrt_{counter}_total{{LABELS}}[$__rate_interval]))"


def total(gauge: str) -> str:
    return f"sum(radixrt_{gauge}{{LABELS}})"


def quantiles(histogram: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate(radixrt_{histogram}_bucket{{LABELS}}[$__rate_interval]))"
    return {
        f"p{share:.0%}".rstrip("%"): f"histogram_quantile({share}, {buckets})"
        for share in (0.5, 0.9, 0.99)
    }


PANELS = [
    Panel("Time to first token", "s", quantiles("time_to_first_token_seconds"), "From a request's arrival to its first token."),
    Panel("Time between tokens", "s", quantiles("inter_token_latency_seconds"), "Between two tokens of a streamed answer."),
    Panel("Request latency", "s", quantiles("e2e_request_latency_seconds"), "From a request's arrival to the last token."),
    Panel("Time in the queue", "s", quantiles("request_queue_time_seconds"), "From arrival to the first chunk of prefill."),
    Panel(
        "Tokens per second",
        "short",
        {"generated": rate("generated_tokens"), "prompts, from the cache": rate("cached_tokens"), "prompts, computed": f"{rate('prompt_tokens')} - {rate('cached_tokens')}"},
        "Generated tokens, and prompt tokens by origin.",
    ),
    Panel("Requests", "short", {"running": total("running_requests"), "waiting": total("queued_requests")}, "Sequences in the batch and in the queue."),
    Panel(
        "Cached share of prompts",
        "percentunit",
        {"hit rate": f"{rate('cached_tokens')} / {rate('prompt_tokens')}"},
        "Prompt tokens found in the radix tree.",
    ),
    Panel(
        "KV pool",
        "short",
        {
            "owned": total("kv_pages_used"),
            "locked": f"clamp_min({total('kv_pages_cached')} - {total('kv_pages_evictable')} - {total('kv_pages_pinned')}, 0)",
            **{name: total(f"kv_pages_{name}") for name in ("pinned", "evictable", "free")},
        },
        "Pages: owned by one running sequence each; in the tree and used by running sequences, pinned by leases, evictable; free.",
    ),
    Panel(
        "Memory pressure",
        "short",
        {"evicted pages": rate("evicted_pages"), "retractions": rate("retractions")},
        "Per second. Retractions mean that running sequences lacked memory.",
    ),
    Panel(
        "Answers by outcome",
        "short",
        {"{{outcome}}": "sum by (outcome) (rate(radixrt_answers_total{LABELS}[$__rate_interval]))", "refused": rate("refused_requests")},
        "Per second. error and client_left are requests that were cut short.",
    ),
    Panel("Length of prompts", "short", quantiles("request_prompt_tokens"), "Tokens."),
    Panel("Length of answers", "short", quantiles("request_generation_tokens"), "Tokens."),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON model."""
    return {
        "title": "radixrt",
        "uid": "radixrt",
        "description": "Latency, throughput, queue and KV cache of radixrt servers.",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [DATA_SOURCE, variable("model_name"), variable("instance")]},
        "panels": [panel(number, one) for number, one in enumerate(PANELS)],
    }


DATA_SOURCE = {
    "name": "datasource",
    "type": "datasource",
    "query": "prometheus",
    "label": "Data source",
}


def variable(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values(radixrt_running_requests, {label})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def panel(number: int, of: Panel) -> dict[str, Any]:
    return {
        "id": number + 1,
        "title": of.title,
        "description": of.description,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": of.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "legendFormat": legend,
                "expr": expression.replace("LABELS", SERVER),
            }
            for index, (legend, expression) in enumerate(of.queries.items())
        ],
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=2))
