"""Converts calls and answers to and from the standard fields of OpenAI's API."""

from dataclasses import fields
from typing import Any

from radixrt.lang.backends.protocol import (
    DEFAULT_MAX_TOKENS,
    Call,
    JsonSchema,
    PartialValue,
    Piece,
    ServerTimes,
    ToolCallPiece,
    Usage,
)

STANDARD_SAMPLING = (
    "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop",
)  # fmt: skip


def path_of(call: Call) -> str:
    return "/v1/completions" if isinstance(call.prompt, str) else "/v1/chat/completions"


def standard_body(call: Call, model: str | None) -> dict[str, Any]:
    """The standard fields of a request; the backend adds others."""
    body: dict[str, Any] = {}
    if call.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if model is not None:
        body["model"] = model
    if isinstance(call.prompt, str):
        body |= {"prompt": call.prompt, "max_tokens": DEFAULT_MAX_TOKENS}
    else:
        body["messages"] = call.prompt
    given = call.sampling.given()
    body |= {name: given[name] for name in STANDARD_SAMPLING if name in given}
    if call.n > 1:
        body["n"] = call.n
    if isinstance(call.constraint, JsonSchema):
        body["response_format"] = response_format(call.constraint)
    if call.tools:
        body["tools"] = call.tools
        if call.tool_choice is not None:
            body["tool_choice"] = _tool_choice(call.tool_choice)
    return body


def response_format(constraint: JsonSchema) -> dict[str, Any]:
    name = "".join(c if c.isalnum() or c in "_-" else "_" for c in constraint.name)[:64]
    schema: dict[str, Any] = {"name": name, "schema": constraint.schema}
    if is_strict(constraint.schema):
        schema["strict"] = True
    return {"type": "json_schema", "json_schema": schema}


def is_strict(schema: Any) -> bool:
    """Whether OpenAI's strict mode accepts a schema: all objects are closed, and all their
    properties are required."""
    if isinstance(schema, list):
        return all(is_strict(item) for item in schema)
    if not isinstance(schema, dict):
        return True
    if schema.get("type") == "object" and (
        schema.get("additionalProperties") is not False
        or set(schema.get("required", ())) != set(schema.get("properties", {}))
    ):
        return False
    return all(is_strict(value) for value in schema.values())


def pieces_of(event: dict[str, Any]) -> list[Piece]:
    """The pieces of an answer, or of a streamed event, of either endpoint."""
    pieces = [_piece(choice) for choice in event.get("choices") or ()]
    if (usage := event.get("usage")) is not None:
        pieces.append(Piece(usage=usage_of(usage)))
    if (times := event.get("times")) is not None:
        known = {field.name: times[field.name] for field in fields(ServerTimes)}
        pieces.append(Piece(times=ServerTimes(**known)))
    return pieces


def _piece(choice: dict[str, Any]) -> Piece:
    message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    text, calls = message.get("content"), message.get("tool_calls") or ()
    return Piece(
        index=choice.get("index", 0),
        text=text or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        tool_calls=tuple(_tool_call(call, place) for place, call in enumerate(calls)),
        values=tuple(
            PartialValue(event["pointer"], event["value"])
            for event in choice.get("values") or ()
            if event["event"] == "value.completed" and "tool_call" not in event
        ),
        finish_reason=choice.get("finish_reason"),
    )


def _tool_call(call: dict[str, Any], place: int) -> ToolCallPiece:
    """
    Args:
        place: the call's place in a whole answer, whose calls have no index.
    """
    function = call.get("function") or {}
    return ToolCallPiece(
        index=call.get("index", place),
        id=call.get("id") or "",
        name=function.get("name") or "",
        arguments=function.get("arguments") or "",
    )


def usage_of(usage: dict[str, Any]) -> Usage:
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens") or 0,
    )


def _tool_choice(choice: str) -> Any:
    if choice in ("auto", "required", "none"):
        return choice
    return {"type": "function", "function": {"name": choice}}
