"""The bodies of requests to Ollama's endpoints, and their translation into requests for chat and
completions that have the same meaning."""

import re
from typing import Any

import msgspec

from radixrt.api.embeddings import PooledFields
from radixrt.api.requests.messages import json_text
from radixrt.api.requests.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationFields,
    RequestBody,
    refuse_unsupported,
)
from radixrt.base.errors import RequestError, wrong
from radixrt.base.image_parts import image_base64
from radixrt.kv.cache_hint import CacheHint

TAG = ":latest"
"""Ollama's clients may put it behind a model's name."""


class Options(msgspec.Struct, kw_only=True):
    """Sampling settings under Ollama's names. Those that say how a model is loaded (``num_ctx``,
    ``num_gpu``, …) are ignored."""

    num_predict: int | None = None
    """``max_tokens``; below 0: as many as fit."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFields(GenerationFields, kw_only=True):
    """Common fields; those of :class:`GenerationFields` have the same meaning as in chat."""

    options: Options | None = None
    format: str | dict[str, Any] | None = None
    """"json", or a JSON schema."""
    think: bool | str | None = None
    """The template's variable ``enable_thinking``; or an effort, ``reasoning_effort`` of chat."""
    keep_alive: float | str | None = None
    """Time for which the request's KV is retained before others': seconds, or a duration such as
    "5m"; below 0: without end; 0: not at all."""
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        self.model = (self.model or "").removesuffix(TAG) or None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Files in base64."""
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(OllamaFields, kw_only=True):
    messages: list[OllamaMessage] | None = None
    """None or empty: the request only asks whether the model is loaded."""
    tools: list[dict[str, Any]] | None = None

    # beyond Ollama's, as in chat
    tool_choice: str | dict[str, Any] | None = None
    replay_reasoning: bool | None = None


class GenerateRequest(OllamaFields, kw_only=True):
    prompt: str | None = None
    """None or empty: the request only asks whether the model is loaded."""
    system: str | None = None
    images: list[str] | None = None
    """Files in base64."""
    suffix: str | None = None
    """Text behind the answer, for models that fill in the middle."""
    raw: bool | None = None
    """The prompt is not put into the chat template."""


class ShowRequest(RequestBody, kw_only=True):
    model: str | None = None
    name: str | None = None
    """The older name of ``model``."""

    def __post_init__(self) -> None:
        self.model = (self.model or self.name or "").removesuffix(TAG) or None


class OldEmbedRequest(PooledFields, kw_only=True):
    """The body of ``/api/embeddings``, the older form."""

    prompt: str | None = None
    """None or empty: the request only asks whether the model is loaded."""
    options: dict[str, Any] | None = None
    """Accepted, and not used: those of sampling and of loading a model."""
    keep_alive: float | str | None = None
    """Accepted, and not used."""

    def __post_init__(self) -> None:
        self.model = (self.model or "").removesuffix(TAG) or None


class EmbedRequest(OldEmbedRequest, kw_only=True):
    """The body of ``/api/embed``."""

    input: str | list[str] | None = None
    """A text or texts; none: the request only asks whether the model is loaded."""
    truncate: bool | None = None
    """False: an input that is longer than the context is refused. Otherwise it is cut at its
    end."""
    dimensions: int | None = None
    """Length to which the vectors are cut."""


REFUSED = ("template", "context", "width", "height", "steps")
"""Fields that would change the answer."""


def refuse_in_generate(body: dict[str, Any]) -> None:
    """Raises RequestError if the body has a field that this server would have to ignore, such as
    those of tools."""
    for name in ("tools", "tool_choice"):
        if body.get(name) not in (None, [], "none", "auto"):
            raise RequestError(
                "/api/generate calls no tools; leave tools and tool_choice out, or send a chat to /api/chat.",
                param=name,
            )
    refuse_unsupported(body, REFUSED)


_OPTIONS = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Our names of the options that are called otherwise."""
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def chat_of(fields: ChatRequest) -> ChatCompletionRequest:
    """Raises RequestError if a field is not supported or malformed; names it."""
    messages = [
        _message(message, f"messages[{index}]")
        for index, message in enumerate(fields.messages or ())
    ]
    return _chat(fields, messages, tools=fields.tools or None)


def chat_of_prompt(fields: GenerateRequest) -> ChatCompletionRequest:
    """Raises RequestError as in :func:`chat_of`."""
    content = with_images(fields.prompt or "", fields.images, "images")
    messages = [ChatMessage(role="user", content=content)]
    if fields.system:
        messages.insert(0, ChatMessage(role="system", content=fields.system))
    return _chat(fields, messages)


def completion_of(fields: GenerateRequest) -> CompletionRequest:
    """The request of a raw prompt, or of one with a suffix.

    Raises:
        RequestError: as in :func:`chat_of`.
    """
    if fields.images:
        raise wrong("images", "need the chat template, so neither raw nor suffix may be given")
    top = fields.top_logprobs or 0
    return fields.translated(
        CompletionRequest,
        **_shared(fields),
        prompt=fields.prompt or "",
        logprobs=top if fields.logprobs else None,
    )


def _chat(
    fields: OllamaFields, messages: list[ChatMessage], **others: Any
) -> ChatCompletionRequest:
    effort = fields.think if isinstance(fields.think, str) else None
    kwargs = None if fields.think is None else {"enable_thinking": fields.think is not False}
    return fields.translated(
        ChatCompletionRequest,
        **_shared(fields),
        **others,
        messages=messages,
        continue_final_message=messages[-1].role == "assistant" or None,
        reasoning_effort=effort,
        chat_template_kwargs=kwargs,
    )


def _shared(fields: OllamaFields) -> dict[str, Any]:
    """The fields of chat and completions that have another value, or another name, here."""
    shared: dict[str, Any] = {"stream": fields.stream is not False}
    options = fields.options
    for name in options.__struct_fields__ if options else ():
        if (value := getattr(options, name)) is not None:
            shared[_OPTIONS.get(name, name)] = value
    if shared.get("max_tokens", fields.max_tokens or 0) < 0:
        shared["max_tokens"] = None
    if fields.format:
        shared["response_format"] = _response_format(fields.format)
    if fields.keep_alive is not None and fields.cache is None:
        shared["cache"] = _retention(seconds_of(fields.keep_alive))
    return shared


def _response_format(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"schema": given}}
    if given != "json":
        raise wrong("format", 'must be "json" or a JSON schema')
    return {"type": "json_object"}


def _retention(seconds: float) -> CacheHint:
    if seconds == 0:
        return CacheHint(retain="none")
    return CacheHint(retain="high", ttl_s=seconds if seconds > 0 else None)


def seconds_of(keep_alive: float | str) -> float:
    """The seconds of a number, or of a duration as Go writes it ("1h30m").

    Raises:
        RequestError: it is neither.
    """
    if not isinstance(keep_alive, str):
        return keep_alive
    unit = "|".join(_UNITS_S)
    if re.fullmatch(rf"-?(\d+(\.\d+)?({unit}))+", keep_alive):
        parts = re.findall(rf"(\d+(?:\.\d+)?)({unit})", keep_alive)
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        return -seconds if keep_alive.startswith("-") else seconds
    if re.fullmatch(r"-?\d{1,9}", keep_alive):
        return float(keep_alive)
    raise wrong("keep_alive", 'must be a number of seconds or a duration such as "5m"')


def with_images(text: str, images: list[str] | None, where: str) -> str | list[dict[str, Any]]:
    """The content of a chat message: its images, in base64, before its text.

    Raises:
        RequestError: one is empty or too long.
    """
    if not images:
        return text
    parts = [
        {"type": "image", "data": image_base64(one, f"{where}[{number}]")}
        for number, one in enumerate(images)
    ]
    return [*parts, {"type": "text", "text": text}]


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    calls = [
        _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())
    ]
    return ChatMessage(
        role=message.role,
        content=with_images(message.content or "", message.images, f"{where}.images"),
        reasoning_content=message.thinking or None,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        name=message.tool_name if message.role == "tool" else None,
    )


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, "needs a function with a name")
    arguments = json_text(function.get("arguments") or {}, f"{where}.function.arguments")
    translated = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id") or f"call_{where}", "type": "function", "function": translated}
