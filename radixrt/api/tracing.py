"""Exports a trace of each request by OpenTelemetry: the request, and within it encoding, grammar,
queue, prefill and decode.

Names and attributes are those of OpenTelemetry's semantic conventions for generative AI. Only this
process talks to a collector. The durations of the other processes' work come with the report of an
answer, so tracing costs them nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import time_ns
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixrt import __version__
from radixrt.base.errors import ConfigError
from radixrt.messages.answers import AnswerReport

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/generate": "text_completion",
    "/infill": "text_completion",
}
"""Endpoint to ``gen_ai.operation.name``; requests to others are not traced."""

_FLUSH_MS = 2000

_current: "ContextVar[RequestTrace | None]" = ContextVar("request_trace", default=None)


class Tracing:
    """The exporter of one api process."""

    def __init__(self, endpoint: str, model_name: str) -> None:
        """
        Args:
            endpoint: address of a collector that takes OTLP over HTTP, such as
                http://127.0.0.1:4318.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "--otlp-endpoint needs OpenTelemetry: pip install 'radixrt[otel]'."
            ) from error
        service = {"service.name": "radixrt", "service.version": __version__}
        self._provider = TracerProvider(resource=Resource.create(service))
        exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("radixrt", __version__)
        self.model_name = model_name

    def close(self) -> None:
        """Send the spans that are left; waits at most two seconds."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


class RequestTrace:
    """The span of one HTTP request, and the facts about it that come with its answers."""

    def __init__(self, tracing: Tracing, scope: Scope) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._tracer = tracing.tracer
        self.began_ns = time_ns()
        self._operation = _OPERATIONS[scope["path"]]
        self._usage = dict.fromkeys(("input_tokens", "output_tokens", "cache_read.input_tokens"), 0)
        self._finish_reasons: list[str] = []
        server = scope.get("server") or ("", 0)
        self._span: Span = self._tracer.start_span(
            f"{self._operation} {tracing.model_name}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            start_time=self.began_ns,
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "radixrt",
                "gen_ai.request.model": tracing.model_name,
                "gen_ai.response.model": tracing.model_name,
                "server.address": str(server[0]),
                "server.port": int(server[1] or 0),
                "url.path": scope["path"],
            },
        )

    def answer_ended(self, index: int, report: AnswerReport) -> None:
        """Take in the report of a complete answer.

        Args:
            index: of the answer among the ``n`` of its prompt.
        """
        if index == 0:  # the other answers have the same prompt
            self._usage["input_tokens"] += report.prompt_tokens
            self._usage["cache_read.input_tokens"] += report.cached_tokens
        self._usage["output_tokens"] += report.output_tokens
        self._finish_reasons.append(str(report.finish_reason))
        for name, begin_ns, end_ns in _stages(report, self.began_ns, time_ns()):
            self._child(name, begin_ns, end_ns, {"radixrt.answer.index": index})

    def ended(self, status: int) -> None:
        """The response is complete, or the client has left (status 499)."""
        from opentelemetry.trace import StatusCode

        for name, value in self._usage.items():
            self._span.set_attribute(f"gen_ai.usage.{name}", value)
        self._span.set_attribute("gen_ai.response.finish_reasons", self._finish_reasons)
        self._span.set_attribute("http.response.status_code", status)
        if status >= 400:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _child(self, name: str, begin_ns: int, end_ns: int, attributes: dict[str, Any]) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(self._span)
        span = self._tracer.start_span(name, parent, start_time=begin_ns, attributes=attributes)
        span.end(end_ns)


def _stages(report: AnswerReport, began_ns: int, ended_ns: int) -> Iterator[tuple[str, int, int]]:
    """Name, beginning and end of each stage of a complete answer, from its durations."""

    def after(begin_ns: int, seconds: float) -> int:
        return min(ended_ns, begin_ns + int(seconds * 1e9))

    yield "encode", began_ns, after(began_ns, report.encode_s)
    if report.grammar_s:
        yield "grammar", began_ns, after(began_ns, report.grammar_s)
    arrived_ns = max(began_ns, ended_ns - int(report.total_s * 1e9))
    planned_ns = after(arrived_ns, report.queued_s)
    first_ns = after(planned_ns, report.prefill_s)
    yield "queue", arrived_ns, planned_ns
    yield "prefill", planned_ns, first_ns
    yield "decode", first_ns, ended_ns


class TraceRequests:
    """Middleware that traces the requests to endpoints that generate."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in _OPERATIONS:
            await self.app(scope, receive, send)
            return
        status = 499  # as nginx names a client that left

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with _tracing(RequestTrace(self._tracing, scope)) as trace:
            try:
                await self.app(scope, receive, send_noting)
            finally:
                trace.ended(status)


@contextmanager
def _tracing(trace: RequestTrace) -> Iterator[RequestTrace]:
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


def current_trace() -> RequestTrace | None:
    """The trace of the request that the running task answers; None: it is not traced."""
    return _current.get()
