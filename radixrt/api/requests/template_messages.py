"""Turns chat messages into the form of chat templates: text only, tool arguments as objects."""

from typing import Any

import orjson

from radixrt.api.requests.custom_tools import call_of_custom
from radixrt.api.requests.protocol import ChatMessage
from radixrt.base.errors import RequestError, shown
from radixrt.base.nesting import check_depth

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}  # fmt: skip
"""Our name of each role: "developer" is what OpenAI's newer models call "system"."""


def to_template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Raises:
    RequestError: a role is unknown, or a message is not text.
    """
    return [
        _to_template_message(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def _to_template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(message.role)}.",
            param=f"{where}.role",
        )
    if message.content is None and role != "assistant":
        raise RequestError(f"{where}.content is missing.", param=f"{where}.content")
    result: dict[str, Any] = {"role": role, "content": _text(message.content, f"{where}.content")}
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    return result


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Text parts are joined by line breaks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise RequestError(
            f"{where} is of type {shown(kind)}; this server takes text parts only.", param=where
        )
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string.", param=f"{where}.text")
    return text


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """OpenAI writes arguments as a JSON string; templates write them as JSON themselves."""
    if call.get("type") == "custom":
        call = call_of_custom(call, where)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} needs a function with a name.", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise RequestError(
                f"{where}.function.arguments is not valid JSON: {error}.", param=where
            ) from error
    check_depth(arguments, f"{where}.function.arguments")
    shown = {name: value for name, value in call.items() if name != "cache_control"}
    return {**shown, "function": {**function, "arguments": arguments}}
