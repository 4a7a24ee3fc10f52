"""Puts the messages of a chat into the form that a template demands: ids of nine characters,
``thinking`` in place of ``reasoning_content``."""

import hashlib
import re
from collections import deque
from typing import Any

_DEMAND = "alphanumeric strings with length"
"""Part of the error that a template raises at other ids."""
_NINE = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def demands_nine_characters(chat_template: Any) -> bool:
    """Whether a template, or one of several, refuses other ids."""
    return _DEMAND in str(chat_template)


def with_nine_characters(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat with ids of nine letters and digits for all tool calls and their
    results.

    An id gives the same new id in every request, so that the prompt of a chat's next request begins
    with that of the last. A call without an id gets one by its place, and a result without an id
    that of the first call without a result.
    """
    result = []
    unanswered: deque[str] = deque()
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            calls = [
                {**call, "id": _nine(call.get("id") or f"{index}.{number}")}
                for number, call in enumerate(calls)
            ]
            unanswered.extend(call["id"] for call in calls)
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            answered = _nine(given) if given else unanswered[0] if unanswered else _nine("")
            if answered in unanswered:
                unanswered.remove(answered)
            message = {**message, "tool_call_id": answered}
        result.append(message)
    return result


def _nine(call_id: str) -> str:
    if _NINE.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode()).digest()[:8])
    return "".join(_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(9))


def reads_thinking(chat_template: Any) -> bool:
    """Whether a template, or one of several, reads ``thinking``."""
    return "message.thinking" in str(chat_template)


def with_thinking(messages: list[dict[str, Any]], chat_template: Any) -> list[dict[str, Any]]:
    """The messages of a chat, with ``thinking`` in place of ``reasoning_content``.

    gpt-oss's template takes no content beside the reasoning before a call, so there it becomes a
    part of it.
    """
    joins = "<|channel|>" in str(chat_template)
    return [_with_thinking(message, joins) for message in messages]


def _with_thinking(message: dict[str, Any], joins: bool) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    if joins and message.get("tool_calls") and message.get("content"):
        return {**others, "thinking": f"{reasoning}\n{message['content']}", "content": ""}
    return {**others, "thinking": reasoning}
