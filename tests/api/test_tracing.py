"""Traces of requests, as a collector gets them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.api.conftest import RunningServer, StartServer, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector:
    """Takes spans in OTLP over HTTP."""

    def __init__(self) -> None:
        spans: list[Any] = []
        self.spans = spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def request_spans(self, count: int) -> list[Any]:
        """The spans of ``count`` requests, once they have come."""
        wait_until(lambda: len(self._of_requests()) >= count, timeout_s=15)
        return self._of_requests()

    def _of_requests(self) -> list[Any]:
        return [span for span in self.spans if span.kind == 2]  # SERVER

    def children_of(self, span: Any) -> dict[str, Any]:
        return {child.name: child for child in self.spans if child.parent_span_id == span.span_id}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def server(start_server: StartServer, collector: Collector) -> RunningServer:
    server = start_server(otlp_endpoint=collector.url)
    server.answer_with("true")
    return server


def attributes(span: Any) -> dict[str, Any]:
    values = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        values[pair.key] = (
            [each.string_value for each in value.values] if kind == "array_value" else value
        )
    return values


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_child_of_the_callers_span_with_its_stages(
    server: RunningServer, collector: Collector, stream: bool
) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "guided_json": {"type": "boolean"},
        "stream": stream,
    }
    with server.http as http:
        http.post("/v1/chat/completions", json=body, headers=HEADERS)
    (span,) = collector.request_spans(1)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.name) == (
        TRACE,
        PARENT,
        "chat tiny",
    )
    told = attributes(span)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.usage.input_tokens"] > 0 < told["gen_ai.usage.output_tokens"]
    assert told["gen_ai.usage.cache_read.input_tokens"] > 0
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert "error.type" not in told
    stages = collector.children_of(span)
    assert set(stages) == {"encode", "grammar", "queue", "prefill", "decode"}
    for child in stages.values():
        begin, end = child.start_time_unix_nano, child.end_time_unix_nano
        assert span.start_time_unix_nano <= begin <= end <= span.end_time_unix_nano
    assert stages["grammar"].end_time_unix_nano > stages["grammar"].start_time_unix_nano
    assert not any(
        "hi" in str(pair.value) for pair in span.attributes if pair.key.startswith("gen_ai.input")
    )


def test_a_refused_request_is_an_error(server: RunningServer, collector: Collector) -> None:
    with server.http as http:
        assert (
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400
        )
    (span,) = collector.request_spans(1)
    assert attributes(span)["error.type"] == "400"
    assert span.status.code == 2


def test_a_dead_collector_disturbs_nobody(start_server: StartServer) -> None:
    server = start_server(otlp_endpoint="http://127.0.0.1:9")
    server.answer_with("Hello")
    with server.http as http:
        for _ in range(3):
            assert http.post("/v1/completions", json={"prompt": "x"}).status_code == 200
