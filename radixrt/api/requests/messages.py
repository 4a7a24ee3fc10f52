"""Reads the messages of a chat: their form for chat templates, text only and with the arguments of
calls as objects, and their cache breakpoints.

Anthropic's clients mark a breakpoint with ``cache_control``, OpenAI's with
``prompt_cache_breakpoint``. Translators of other APIs read their untyped items here too.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import orjson

from radixrt.api.requests.protocol import TTL_S, CacheControl, ChatMessage, PromptCacheOptions
from radixrt.api.requests.tools import call_of_custom
from radixrt.base.convert import check_depth
from radixrt.base.errors import RequestError, shown, wrong
from radixrt.base.image_parts import IMAGE_PARTS, image_part
from radixrt.messages.requests import CacheBreakpoint

log = logging.getLogger(__name__)

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}  # fmt: skip
"""Our name of each role: "developer" is what OpenAI's newer models call "system"."""

MAX_BREAKPOINTS = 4
"""Most breakpoints of one request, as in Anthropic's API."""
TOOLS = -1
"""The tools, in place of a message's index."""
DEFAULT_TTL = "30m"
"""Lifetime of a ``prompt_cache_breakpoint`` that names none."""
_TTL_S = {"5m": 300.0, "1h": 3600.0}
"""Seconds of each lifetime that Anthropic's fields have."""

_MAX_WARNINGS = 100
_LONGEST_KIND = 80
"""Characters."""

_skipped: set[tuple[str, str]] = set()
"""What the log has named."""


def to_template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Raises RequestError if a role is unknown, or a message is not text."""
    return [
        _to_template_message(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def _to_template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise wrong(
            f"{where}.role", f"must be one of {', '.join(_ROLES)}, not {shown(message.role)}"
        )
    if message.content is None and role != "assistant":
        raise wrong(f"{where}.content", "is missing")
    content = _content(message.content, f"{where}.content")
    if isinstance(content, list) and role not in ("user", "tool"):
        raise wrong(
            f"{where}.content", "holds an image; only messages of the roles user and tool may"
        )
    result: dict[str, Any] = {"role": role, "content": content}
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(message.tool_calls)
        ]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    return result


def _content(content: str | list[dict[str, Any]] | None, where: str) -> str | list[dict[str, Any]]:
    """Text parts alone are joined by line breaks; beside images they stay parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if any(part.get("type") in IMAGE_PARTS for part in content):
        return [_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return "\n".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    if part.get("type") in IMAGE_PARTS:
        return image_part(part, where)
    return {"type": "text", "text": _part_text(part, where)}


def _part_text(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise wrong(where, f"is of type {shown(kind)}; this server takes text and images")
    if not isinstance(text, str):
        raise wrong(f"{where}.text", "must be a string")
    return text


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """OpenAI writes arguments as a JSON string; templates write them as JSON themselves."""
    if call.get("type") == "custom":
        call = call_of_custom(call, where)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(where, "needs a function with a name")
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


# ---------------------------------------------------------------- cache breakpoints


def cache_breakpoints(
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None,
    num_before: int,
    options: PromptCacheOptions | None,
) -> list[CacheBreakpoint]:
    """One for each message, and the tools, that has any; a message with several is kept for the
    longest time.

    Args:
        num_before: number of messages before these.
        options: has the lifetime of OpenAI's breakpoints, the last four of which count.

    Raises:
        RequestError: there are too many, or one is malformed or in a place where it has no meaning.
    """
    ttls: dict[int, float] = {}
    marks = [*_tool_marks(tools or []), *_message_marks(messages)]
    for index, control in marks:
        ttls[index] = max(ttls.get(index, 0.0), _TTL_S[control.ttl or "5m"])
    for index, ttl_s in [*_openai_breakpoints(messages, options)][-MAX_BREAKPOINTS:]:
        ttls[index] = max(ttls.get(index, 0.0), ttl_s)
    if len(marks) > MAX_BREAKPOINTS:
        raise RequestError(
            f"The request has {len(marks)} cache_control marks; at most {MAX_BREAKPOINTS} are allowed. Each keeps all that "
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


def _message_marks(messages: list[ChatMessage]) -> Iterator[tuple[int, CacheControl]]:
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.cache_control is not None:
            yield index, _checked(message.cache_control, f"{where}.cache_control")
        parts = message.content if isinstance(message.content, list) else []
        for name, marked in (("content", parts), ("tool_calls", message.tool_calls or [])):
            for number, part in enumerate(marked):
                if (mark := part.get("cache_control")) is not None:
                    yield index, read_cache_control(mark, f"{where}.{name}[{number}].cache_control")


def _openai_breakpoints(
    messages: list[ChatMessage], options: PromptCacheOptions | None
) -> Iterator[tuple[int, float]]:
    """OpenAI's breakpoints, and their seconds."""
    default_ttl = (options and options.ttl) or DEFAULT_TTL
    for index, message in enumerate(messages):
        for number, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if (mark := part.get("prompt_cache_breakpoint")) is None:
                continue
            where = f"messages[{index}].content[{number}].prompt_cache_breakpoint"
            ttl = (mark.get("ttl") if isinstance(mark, dict) else mark) or default_ttl  # fmt: skip
            if not isinstance(mark, dict) or mark.get("mode") != "explicit" or ttl not in tuple(TTL_S):  # fmt: skip
                raise wrong(
                    where,
                    'must be {"mode": "explicit"}, optionally with "ttl": "30m" (the default) or "12h"',
                )
            yield index, TTL_S[ttl]


def _tool_marks(tools: list[dict[str, Any]]) -> Iterator[tuple[int, CacheControl]]:
    for index, tool in enumerate(tools):
        if (mark := _mark_on(tool)) is None:
            continue
        where = f"tools[{index}].cache_control"
        if index != len(tools) - 1:
            raise RequestError(
                f"{where}: templates may write all tools in one block, so only the last of them can be marked; move it "
                f"to tools[{len(tools) - 1}].",
                param=where,
            )
        yield TOOLS, read_cache_control(mark, where)


def _mark_on(tool: dict[str, Any]) -> Any:
    """The mark of a tool: beside the function or, as some clients write it, in it."""
    function = tool.get("function")
    inside = function.get("cache_control") if isinstance(function, dict) else None
    beside = tool.get("cache_control")
    return inside if beside is None else beside


def _unmarked(tool: dict[str, Any]) -> dict[str, Any]:
    copy = {name: value for name, value in tool.items() if name != "cache_control"}
    if isinstance(function := copy.get("function"), dict):
        copy["function"] = {n: value for n, value in function.items() if n != "cache_control"}
    return copy


def read_cache_control(mark: Any, where: str) -> CacheControl:
    """Raises RequestError if the mark is malformed; names its place."""
    try:
        return _checked(msgspec.convert(mark, CacheControl), where)
    except msgspec.ValidationError as error:
        raise _malformed(where) from error


def _checked(control: CacheControl, where: str) -> CacheControl:
    if control.type != "ephemeral" or control.ttl not in (None, *_TTL_S):
        raise _malformed(where)
    return control


def _malformed(where: str) -> RequestError:
    return wrong(
        where, 'must be {"type": "ephemeral"}, optionally with "ttl": "5m" (the default) or "1h"'
    )


# ---------------------------------------------------------------- items of other APIs


def string_in(item: dict[str, Any], name: str, where: str) -> str:
    """The field ``name`` of an item.

    Args:
        where: the item's place in the request, for errors.

    Raises:
        RequestError: it is missing, or no string; names it.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "must be a string")
    return value


def text_parts(
    content: Any,
    where: str,
    read: Callable[[Any, str], dict[str, Any]],
    name: str = "content parts",
    first: int = 0,
) -> list[dict[str, Any]]:
    """Text parts of a chat message, from a text or a list.

    Args:
        where: the content's place in the request, for errors.
        read: the text part of one element at a place.
        name: of the elements.
        first: index of the first element in the request.

    Raises:
        RequestError: it is neither, or ``read`` refuses an element.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise wrong(where, f"must be a string or a list of {name}")
    return [read(part, f"{where}[{first + index}]") for index, part in enumerate(content)]


def warn_of_skipped(what: str, kind: object) -> None:
    """Log once that items of this type are skipped.

    Args:
        what: plural of such items, as "tools".
    """
    skipped = what, str(kind)[:_LONGEST_KIND]
    if skipped not in _skipped and len(_skipped) < _MAX_WARNINGS:
        _skipped.add(skipped)
        log.warning("Skipped %s of the type %r, which this server does not have.", *skipped)


def json_text(value: Any, where: str = "") -> str:
    """
    Args:
        where: the field in errors; "": the request itself.

    Raises:
        RequestError: it can't be written: an integer beyond 64 bits, or too deep nesting.
    """
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        message = f"{where or 'The request'} can't be written as JSON: {error}."
        raise RequestError(message, param=where or None) from error
