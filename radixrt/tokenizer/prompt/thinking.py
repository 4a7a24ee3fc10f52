"""Gives the reasoning of earlier answers the name under which some chat templates read it: gpt-oss's is ``thinking``."""

from typing import Any


def reads_thinking(chat_template: Any) -> bool:
    """Whether a template, or one of several, reads it."""
    return "message.thinking" in str(chat_template)


def with_thinking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat, with ``thinking`` in place of ``reasoning_content``.

    The template takes no content beside the reasoning before a call, so there it becomes a part of it.
    """
    return [_with_thinking(message) for message in messages]


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    others = {name: value for name, value in message.items() if name != "reasoning_content"}
    if message.get("tool_calls") and message.get("content"):
        return {**others, "thinking": f"{reasoning}\n{message['content']}", "content": ""}
    return {**others, "thinking": reasoning}
