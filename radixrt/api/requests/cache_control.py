"""Reads the cache breakpoints of messages and tools: ``cache_control``, as Anthropic's clients send it."""

from collections.abc import Iterator
from typing import Any

import msgspec

from radixrt.api.requests.prompt_cache import DEFAULT_TTL, TTL_S
from radixrt.api.requests.protocol import CacheControl, ChatMessage
from radixrt.base.errors import RequestError
from radixrt.messages.requests import CacheBreakpoint

MAX_BREAKPOINTS = 4
"""Of one request, as Anthropic's."""
TOOLS = -1
"""In place of a message's index."""

_TTL_S = {"5m": 300.0, "1h": 3600.0}


def cache_breakpoints(
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    num_before: int = 0,
    default_ttl: str | None = None,
) -> list[CacheBreakpoint]:
    """One for each message, and the tools, that has any; a message with several is kept for the longest time.

    Args:
        num_before: number of messages before these.
        default_ttl: of OpenAI's breakpoints, the last four of which count.

    Raises:
        RequestError: there are too many, or one is malformed or in a place where it has no meaning.
    """
    ttls: dict[int, float] = {}
    marks = [*_of_tools(tools or []), *_of_messages(messages)]
    count = len(marks)
    for index, control in marks:
        ttls[index] = max(ttls.get(index, 0.0), _TTL_S[control.ttl or "5m"])
    for index, ttl_s in [*_of_openai(messages, default_ttl)][-MAX_BREAKPOINTS:]:
        ttls[index] = max(ttls.get(index, 0.0), ttl_s)
    if count > MAX_BREAKPOINTS:
        raise RequestError(
            f"The request has {count} cache_control marks; at most {MAX_BREAKPOINTS} are allowed. Each keeps all that "
            "is before it, so drop the earlier ones.",
            param="cache_control",
        )
    return [
        CacheBreakpoint(index if index == TOOLS else num_before + index, ttl_s)
        for index, ttl_s in ttls.items()
    ]


def without_cache_control(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools as the chat template may see them."""
    return None if tools is None else [_unmarked(tool) for tool in tools]


def _of_messages(messages: list[ChatMessage]) -> Iterator[tuple[int, CacheControl]]:
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.cache_control is not None:
            yield index, _checked(message.cache_control, f"{where}.cache_control")
        parts = message.content if isinstance(message.content, list) else []
        for name, marked in (("content", parts), ("tool_calls", message.tool_calls or [])):
            for number, part in enumerate(marked):
                if (mark := part.get("cache_control")) is not None:
                    yield index, _parsed(mark, f"{where}.{name}[{number}].cache_control")


def _of_openai(messages: list[ChatMessage], default_ttl: str | None) -> Iterator[tuple[int, float]]:
    """OpenAI's breakpoints, and their seconds."""
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if (mark := part.get("prompt_cache_breakpoint")) is None:
                continue
            where = f"messages[{index}].content[{number}].prompt_cache_breakpoint"
            ttl = (mark.get("ttl") if isinstance(mark, dict) else mark) or default_ttl or DEFAULT_TTL  # fmt: skip
            if not isinstance(mark, dict) or mark.get("mode") != "explicit" or ttl not in tuple(TTL_S):  # fmt: skip
                raise RequestError(
                    f'{where} must be {{"mode": "explicit"}}, optionally with "ttl": "30m" (the default) or "12h".',
                    param=where,
                )
            yield index, TTL_S[ttl]


def _of_tools(tools: list[dict[str, Any]]) -> Iterator[tuple[int, CacheControl]]:
    for index, tool in enumerate(tools):
        mark = _mark_of(tool)
        if mark is None:
            continue
        where = f"tools[{index}].cache_control"
        if index != len(tools) - 1:
            raise RequestError(
                f"{where}: templates may write all tools in one block, so only the last of them can be marked; move it "
                f"to tools[{len(tools) - 1}].",
                param=where,
            )
        yield TOOLS, _parsed(mark, where)


def _mark_of(tool: dict[str, Any]) -> Any:
    """Beside the function or, as some clients write it, in it."""
    function = tool.get("function")
    inside = function.get("cache_control") if isinstance(function, dict) else None
    beside = tool.get("cache_control")
    return inside if beside is None else beside


def _unmarked(tool: dict[str, Any]) -> dict[str, Any]:
    copy = {name: value for name, value in tool.items() if name != "cache_control"}
    if isinstance(function := copy.get("function"), dict):
        copy["function"] = {n: value for n, value in function.items() if n != "cache_control"}
    return copy


def _parsed(mark: Any, where: str) -> CacheControl:
    try:
        return _checked(msgspec.convert(mark, CacheControl), where)
    except msgspec.ValidationError as error:
        raise _malformed(where) from error


def _checked(control: CacheControl, where: str) -> CacheControl:
    if control.type != "ephemeral" or control.ttl not in (None, *_TTL_S):
        raise _malformed(where)
    return control


def _malformed(where: str) -> RequestError:
    return RequestError(
        f'{where} must be {{"type": "ephemeral"}}, optionally with "ttl": "5m" (the default) or "1h".',
        param=where,
    )
