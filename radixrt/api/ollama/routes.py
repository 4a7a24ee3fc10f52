"""``/api/chat``, ``/api/generate`` and what Ollama's clients ask about models."""

import time
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from radixrt import __version__
from radixrt.api.answering import Formatter, PreparedRequest, respond
from radixrt.api.embeddings import as_list, embed, written
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import ErrorShape
from radixrt.api.http.events import LineStream, json_line, json_response
from radixrt.api.logprobs import chat_entries
from radixrt.api.ollama.translation import (
    REFUSED,
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaFields,
    ShowRequest,
    chat_of,
    chat_of_prompt,
    completion_of,
    refuse_in_generate,
    seconds_of,
)
from radixrt.api.openai.chat import prepare_chat
from radixrt.api.openai.completions import prepare_completion
from radixrt.api.requests.protocol import refuse_fields
from radixrt.api.responses import explanation_extras, structured_extras
from radixrt.api.state import ServerState
from radixrt.client.pooling import max_input_tokens, unit
from radixrt.messages.answers import AnswerChunk, AnswerReport, EngineInfo
from radixrt.messages.message import ToolCall

ERRORS = ErrorShape("/api/", lambda error: {"error": error.message}, "")


NEVER = "9999-12-31T23:59:59Z"
"""Time at which a model that stays loaded expires."""


def ollama_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/api/chat", ChatRequest, partial(refuse_fields, names=REFUSED))
    async def chat(request: Request, fields: ChatRequest) -> Response:
        answer = Answer(state.config.model_name, in_message=True)
        if not fields.messages:
            return json_response(answer.loaded(unloads=_unloads(state, fields)))
        return await _respond(answer, prepare_chat(chat_of(fields), state, request), request)

    @router.takes("/api/generate", GenerateRequest, refuse_in_generate)
    async def generate(request: Request, fields: GenerateRequest) -> Response:
        answer = Answer(state.config.model_name, in_message=False)
        if not fields.prompt:
            return json_response(answer.loaded(unloads=_unloads(state, fields)))
        prepared: PreparedRequest[Any]
        if fields.raw or fields.suffix:
            prepared = prepare_completion(
                completion_of(fields), state, request, default_max_tokens=None
            )
        else:
            prepared = prepare_chat(chat_of_prompt(fields), state, request)
        return await _respond(answer, prepared, request)

    async def _respond(
        answer: Answer, prepared: PreparedRequest[Any], request: Request
    ) -> Response:
        prepared.check_one_answer()
        return await respond(_Lines(prepared, answer), prepared, request, state)

    @router.takes("/api/show", ShowRequest)
    async def show(request: Request, fields: ShowRequest) -> Response:
        family = state.info.architecture
        capabilities = ["completion", "tools"] if state.info.pooling is None else ["embedding"]
        if state.config.reasoning_parser != "none":
            capabilities.append("thinking")
        facts = {
            "general.architecture": family,
            "general.parameter_count": state.info.num_parameters,
            f"{family}.context_length": state.info.context_length,
        }
        described = {
            "details": _model(state)["details"],
            "model_info": facts,
            "capabilities": capabilities,
            "modified_at": _time(state.started_at),
        }
        return json_response(described)

    @router.takes("/api/pull", ShowRequest)
    async def pull(request: Request, fields: ShowRequest) -> Response:
        return json_response({"status": "success"})  # the only model is here

    @router.get("/api/tags")
    async def tags() -> Response:
        return json_response({"models": [_model(state)]})

    @router.get("/api/ps")
    async def running() -> Response:
        loaded = {
            "expires_at": NEVER,
            "size_vram": state.info.weight_bytes if state.info.device != "cpu" else 0,
            "context_length": state.info.context_length,
        }
        return json_response({"models": [_model(state) | loaded]})

    @router.get("/api/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.takes("/api/embed", EmbedRequest)
    async def embed_all(request: Request, fields: EmbedRequest) -> Response:
        begun = time.perf_counter_ns()
        answer: dict[str, Any] = {"model": state.config.model_name, "embeddings": []}
        if fields.input:
            max_tokens = None if fields.truncate is False else max_input_tokens(-1, state.info)
            found = await embed(request, state, fields, fields.input, max_tokens, fields.dimensions)
            answer["embeddings"] = await written(found.vectors, lambda one: as_list(unit(one)))
            answer["prompt_eval_count"] = found.prompt_tokens
        times = {"total_duration": time.perf_counter_ns() - begun, "load_duration": 0}
        return json_response(answer | times)

    @router.takes("/api/embeddings", OldEmbedRequest)
    async def embed_one(request: Request, fields: OldEmbedRequest) -> Response:
        if not fields.prompt:
            return json_response({"embedding": []})
        max_tokens = max_input_tokens(-1, state.info)
        found = await embed(request, state, fields, fields.prompt, max_tokens)
        return json_response({"embedding": as_list(found.vectors[0])})

    return router


class _Lines(Formatter):
    def __init__(self, prepared: PreparedRequest[Any], answer: Answer) -> None:
        super().__init__(prepared)
        self._answer = answer

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[dict[str, Any]]:
        return self._answer.objects(chunk, await chat_entries(chunk.logprobs))

    def encoded(self, part: dict[str, Any]) -> bytes:
        return json_line(part)

    def whole(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return parts[0]

    def response(self, events: AsyncGenerator[bytes, None]) -> Response:
        return LineStream(events, self._answer.nothing)


def _unloads(state: ServerState, fields: OllamaFields) -> bool:
    given = fields.keep_alive
    return state.is_one_of_several and given is not None and seconds_of(given) == 0


def _model(state: ServerState) -> dict[str, Any]:
    return ollama_model(state.config.model_name, state.info, state.started_at)


def ollama_model(name: str, info: EngineInfo | None, created_at: int) -> dict[str, Any]:
    """A model in Ollama's lists.

    Args:
        info: None: it was not loaded yet.
    """
    details: dict[str, Any] = {"parent_model": "", "format": "safetensors"}
    if info is not None:
        details |= {
            "family": info.architecture,
            "families": [info.architecture],
            "parameter_size": f"{info.num_parameters / 1e6:.1f}M",
            "quantization_level": info.dtype,
        }
    return {
        "name": name,
        "model": name,
        "modified_at": _time(created_at),
        "size": 0 if info is None else info.weight_bytes,
        "digest": "",
        "details": details,
    }


def _time(unix: int) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat().replace("+00:00", "Z")


_NS = 1e9


class Answer:
    """The objects of one answer: each has the text that is new, the last one the numbers.

    Args:
        model: its name.
        in_message: the text is in a ``message``, as of ``/api/chat``; else in ``response``.
    """

    def __init__(self, model: str, in_message: bool) -> None:
        self._model = model
        self._in_message = in_message
        self._calls: list[dict[str, Any]] = []
        """Calls that may go on."""

    def objects(
        self, chunk: AnswerChunk, logprobs: list[orjson.Fragment]
    ) -> Iterator[dict[str, Any]]:
        """The objects that a chunk adds.

        Args:
            logprobs: JSON of each of its tokens, if the request asks for it.
        """
        done = chunk.finish_reason is not None
        for call in chunk.tool_calls:
            self._add(call)
        complete = self._take_calls(all_of_them=done)
        if not (chunk.text or chunk.reasoning or complete or logprobs or done):
            return
        body = self._object(chunk.text, chunk.reasoning, complete)
        if logprobs:
            body["logprobs"] = logprobs
        if done:
            body |= {"done": True, **_numbers(chunk.report), **structured_extras(chunk.report)}
            body |= explanation_extras(chunk.report)
        yield body

    def loaded(self, *, unloads: bool) -> dict[str, Any]:
        """The answer to a request without a prompt, which loads the model, or unloads it."""
        reason = "unload" if unloads else "load"
        return self._object("", "", []) | {"done": True, "done_reason": reason}

    def nothing(self) -> dict[str, Any]:
        """An object that adds nothing, for pauses."""
        return self._object("", "", [])

    def _object(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        message: dict[str, Any] = {"content" if self._in_message else "response": text}
        if reasoning:
            message["thinking"] = reasoning
        if calls:
            message["tool_calls"] = calls
        body = {"message": {"role": "assistant", **message}} if self._in_message else message
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **body, "done": False}

    def _add(self, call: ToolCall) -> None:
        if call.name:
            self._calls.append({"name": call.name, "arguments": ""})
        self._calls[-1]["arguments"] += call.arguments

    def _take_calls(self, all_of_them: bool) -> list[dict[str, Any]]:
        """The calls that are complete: a call goes on until the next one begins."""
        count = len(self._calls) if all_of_them else max(0, len(self._calls) - 1)
        taken, self._calls = self._calls[:count], self._calls[count:]
        calls = []
        for call in taken:
            try:
                arguments = orjson.loads(call["arguments"] or "{}")
            except orjson.JSONDecodeError:
                continue  # cut off by num_predict
            calls.append({"function": {"name": call["name"], "arguments": arguments}})
        return calls


def _numbers(report: AnswerReport) -> dict[str, Any]:
    """The counts of tokens, and durations in nanoseconds."""
    generating_s = max(0.0, report.total_s - report.queued_s - report.prefill_s)
    return {
        "done_reason": report.finish_reason,
        "total_duration": int(report.total_s * _NS),
        "load_duration": 0,
        "prompt_eval_count": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "prompt_eval_duration": int(report.prefill_s * _NS),
        "eval_count": report.output_tokens,
        "eval_duration": int(generating_s * _NS),
    }
