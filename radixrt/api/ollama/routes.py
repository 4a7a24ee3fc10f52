"""``/api/chat``, ``/api/generate`` and what Ollama's clients ask about models."""

import time
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt import __version__
from radixrt.api.answering import Formatter, PreparedRequest, respond
from radixrt.api.embeddings.embeddings import as_list, embed, written
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import ErrorShape
from radixrt.api.http.events import LineStream, json_line, json_response
from radixrt.api.logprobs import chat_entries
from radixrt.api.ollama.answers import Answer
from radixrt.api.ollama.protocol import (
    REFUSED,
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaFields,
    ShowRequest,
    refuse_in_generate,
)
from radixrt.api.ollama.translation import chat_of, chat_of_prompt, completion_of, seconds_of
from radixrt.api.openai.chat import prepare_chat
from radixrt.api.openai.completions import prepare_completion
from radixrt.api.requests.protocol import refuse_fields
from radixrt.api.state import ServerState
from radixrt.client.pooling import max_input_tokens, unit
from radixrt.messages.answers import AnswerChunk, EngineInfo

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
