"""Finds the contents of messages in the text that a template made of them."""

from typing import Any

from radixrt.tokenizer.prompt.breakpoints import Messages

_CALL_DISTANCE = 256
"""Most characters that a template writes before the name of a called function, or between its
arguments."""


def texts(content: Any) -> list[str]:
    """The texts of a message's content."""
    if isinstance(content, list):
        return [part["text"] for part in content if part.get("type") == "text"]
    return [content] if isinstance(content, str) else []


def message_spans(text: str, messages: Messages) -> list[tuple[int, int]]:
    """Beginning and end of each message's content in the rendered text, in order; those of calls of
    tools belong to it. Empty, at the end of the one before, where the text does not contain it
    unchanged."""
    spans = []
    position = 0
    for message in messages:
        start, position = _content_span(text, position, message.get("content"))
        for call in message.get("tool_calls") or ():
            position = _end_of_call(text, position, call)
        spans.append((start, position))
    return spans


def _content_span(text: str, position: int, content: object) -> tuple[int, int]:
    """Beginning and end of a content's texts behind ``position``; a template may trim each."""
    start, end = -1, position
    for written in texts(content):
        found, length = _find_trimmed(text, written, end)
        if found < 0:
            return position, position
        start, end = found if start < 0 else start, found + length
    return (position, position) if start < 0 else (start, end)


def _find_trimmed(text: str, written: str, position: int) -> tuple[int, int]:
    """Where a text, perhaps trimmed, begins behind ``position``, and its length; -1: nowhere."""
    for part in (written, written.strip()):
        if (start := text.find(part, position)) >= 0:
            return start, len(part)
    return -1, 0


def _end_of_call(text: str, position: int, call: Any) -> int:
    """The place in the text where the last string of a tool call ends, if the template writes it
    behind ``position``."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    values = arguments.values() if isinstance(arguments, dict) else ()
    for piece in (function.get("name"), *values):
        if isinstance(piece, str):
            start = text.find(piece, position, position + _CALL_DISTANCE + len(piece))
            position = position if start < 0 else start + len(piece)
    return position


def answer_ends(messages: Messages, spans: list[tuple[int, int]]) -> list[int]:
    """Ends of the assistants' messages that the rendered text contains unchanged, in order."""
    return [
        end
        for message, (_, end) in zip(messages, spans, strict=True)
        if message.get("role") == "assistant"
    ]
