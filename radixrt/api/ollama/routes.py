"""``/api/chat``, ``/api/generate`` and what Ollama's clients ask about models."""

import time
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from fastapi import Response

from radixrt import __version__
from radixrt.api.answering import Formatter, PreparedRequest, respond
from radixrt.api.embeddings import as_list, embed, written
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import LineStream, json_line, json_response
from radixrt.api.logprobs import KeptMass, chat_entries
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
from radixrt.api.requests.protocol import refuse_unsupported
from radixrt.api.responses import report_extras
from radixrt.api.state import Context, Here
from radixrt.client.pooling import max_input_tokens, unit
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.answers import AnswerChunk, AnswerReport, EngineInfo
from radixrt.messages.message import ToolCall

NEVER = "9999-12-31T23:59:59Z"
"""Time at which a model that stays loaded expires."""
_NS = 1e9

routes = Endpoints()


@routes.takes("/api/chat", ChatRequest, partial(refuse_unsupported, also=REFUSED))
async def chat(fields: ChatRequest, context: Context) -> Response:
    if not fields.messages:
        return _loaded(fields, context, "message")
    prepared = prepare_chat(chat_of(fields), context)
    return await respond(_Lines(prepared, context, "message"), context)


@routes.takes("/api/generate", GenerateRequest, refuse_in_generate)
async def generate(fields: GenerateRequest, context: Context) -> Response:
    if not fields.prompt:
        return _loaded(fields, context, "response")
    prepared: PreparedRequest[Any]
    if fields.raw or fields.suffix:
        prepared = prepare_completion(completion_of(fields), context, default_max_tokens=None)
    else:
        prepared = prepare_chat(chat_of_prompt(fields), context)
    return await respond(_Lines(prepared, context, "response"), context)


@routes.takes("/api/show", ShowRequest)
async def show(fields: ShowRequest, context: Context) -> Response:
    info = context.state.info
    capabilities = ["completion", "tools"] if info.pooling is None else ["embedding"]
    if context.state.config.reasoning_parser != "none":
        capabilities.append("thinking")
    model = _model(context)
    described = {
        "details": model["details"],
        "model_info": {
            "general.architecture": info.architecture,
            "general.parameter_count": info.num_parameters,
            f"{info.architecture}.context_length": info.context_length,
        },
        "capabilities": capabilities,
        "modified_at": model["modified_at"],
    }
    return json_response(described)


@routes.takes("/api/pull", ShowRequest)
async def pull(fields: ShowRequest, context: Context) -> Response:
    return json_response({"status": "success"})  # the only model is here


@routes.get("/api/tags")
async def tags(context: Here) -> Response:
    model, adapters = _model(context), context.state.client.adapters.values()
    return json_response({"models": [model, *(ollama_adapter(model, info) for info in adapters)]})


@routes.get("/api/ps")
async def running(context: Here) -> Response:
    info = context.state.info
    loaded = {
        "expires_at": NEVER,
        "size_vram": info.weight_bytes if info.device != "cpu" else 0,
        "context_length": info.context_length,
    }
    return json_response({"models": [_model(context) | loaded]})


@routes.get("/api/version")
async def version() -> Response:
    return json_response({"version": __version__})


@routes.takes("/api/embed", EmbedRequest)
async def embed_all(fields: EmbedRequest, context: Context) -> Response:
    begun, info = time.perf_counter_ns(), context.state.info
    answer: dict[str, Any] = {"model": context.state.config.model_name, "embeddings": []}
    if fields.input:
        max_tokens = None if fields.truncate is False else max_input_tokens(-1, info)
        found = await embed(fields, context, fields.input, max_tokens, fields.dimensions)
        answer["embeddings"] = await written(found.vectors, lambda one: as_list(unit(one)))
        answer["prompt_eval_count"] = found.prompt_tokens
    times = {"total_duration": time.perf_counter_ns() - begun, "load_duration": 0}
    return json_response(answer | times)


@routes.takes("/api/embeddings", OldEmbedRequest)
async def embed_one(fields: OldEmbedRequest, context: Context) -> Response:
    if not fields.prompt:
        return json_response({"embedding": []})
    max_tokens = max_input_tokens(-1, context.state.info)
    found = await embed(fields, context, fields.prompt, max_tokens)
    return json_response({"embedding": as_list(found.vectors[0])})


def _object(
    model: str,
    field: str,
    text: str,
    reasoning: str = "",
    calls: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """An object of a stream.

    Args:
        field: "message", as of ``/api/chat``, or "response": holds the text.
    """
    message: dict[str, Any] = {"content" if field == "message" else field: text}
    if reasoning:
        message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = calls
    body = {"message": {"role": "assistant", **message}} if field == "message" else message
    return {"model": model, "created_at": _time(time.time()), **body, "done": False}


def _loaded(fields: OllamaFields, context: Context, field: str) -> Response:
    """The answer to a request without a prompt, which loads the model, or unloads it."""
    state, given = context.state, fields.keep_alive
    unloads = state.is_one_of_several and given is not None and seconds_of(given) == 0
    end = {"done": True, "done_reason": "unload" if unloads else "load"}
    return json_response(_object(context.model_name, field, "") | end)


class _Lines(Formatter):
    """The objects of one answer: each has the text that is new, the last one the numbers."""

    def __init__(self, prepared: PreparedRequest[Any], context: Context, field: str) -> None:
        super().__init__(prepared)
        prepared.check_one_answer()
        self._object = partial(_object, context.model_name, field)
        self._calls: list[dict[str, Any]] = []
        """Calls that may go on."""
        self._kept_mass = KeptMass()

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[dict[str, Any]]:
        return self._objects(chunk, await chat_entries(chunk.logprobs))

    def encoded(self, part: dict[str, Any]) -> bytes:
        return json_line(part)

    def stream(self, events: AsyncGenerator[bytes, None]) -> Response:
        return LineStream(events, lambda: self._object(""))

    def _objects(
        self, chunk: AnswerChunk, logprobs: list[orjson.Fragment]
    ) -> Iterator[dict[str, Any]]:
        done = chunk.finish_reason is not None
        self._kept_mass.add(chunk.log_kept_masses)
        for call in chunk.tool_calls:
            self._add(call)
        complete = self._take_calls(all_of_them=done)
        if not (chunk.text or chunk.reasoning or complete or logprobs or done):
            return
        body = self._object(chunk.text, chunk.reasoning, complete)
        if logprobs:
            body["logprobs"] = logprobs
        if done:
            body |= {"done": True, **_numbers(chunk.report), **report_extras(chunk.report)}
            body |= self._kept_mass.whole()
        yield body

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


def _model(context: Context) -> dict[str, Any]:
    state = context.state
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


def ollama_adapter(base: dict[str, Any], info: AdapterInfo) -> dict[str, Any]:
    """An adapter in Ollama's list, given the entry of its base model."""
    details = base["details"] | {"parent_model": base["name"]}
    return base | {"name": info.name, "model": info.name, "digest": info.digest, "details": details}


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat().replace("+00:00", "Z")
