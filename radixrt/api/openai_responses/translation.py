"""The body of ``/v1/responses``, and its translation into the chat request that has the same meaning."""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

import msgspec

from radixrt.api.requests.messages import string_in, text_parts, warn_of_skipped
from radixrt.api.requests.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    GenerationFields,
    refuse_unsupported,
)
from radixrt.base.errors import wrong
from radixrt.base.image_parts import image_part

Items = str | list[dict[str, Any]]
"""A text of the user, or items: messages, calls of functions and their outputs, reasoning."""

TEXT_LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    """``reasoning_effort`` of chat."""
    summary: str | None = None
    """Any value: the reasoning is returned as a summary, instead of as its text."""
    generate_summary: str | None = None
    """The older name of ``summary``."""


class TextConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None
    """Accepted, and not used."""


class ResponsesRequest(GenerationFields, kw_only=True):
    """OpenAI's fields; those of :class:`GenerationFields` have the same meaning as in chat."""

    input: Items | None = None
    instructions: str | None = None
    """The system message. It is not part of the stored response."""
    previous_response_id: str | None = None
    store: bool | None = None
    """True by default: the response can be retrieved, and another can go on from it."""
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    """"disabled": an input that is too long is an error."""
    metadata: dict[str, Any] | None = None
    """Returned as it is."""
    safety_identifier: str | None = None
    """The same."""

    # beyond OpenAI's, as in chat
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    replay_reasoning: bool | None = None


_REFUSED = ("background", "conversation", "prompt", "moderation")
"""Fields that would change the answer, beside those that chat refuses."""


def refuse_unsupported_fields(body: dict[str, Any]) -> None:
    """Raises RequestError if the body has a field that this server would have to ignore."""
    refuse_unsupported(body, _REFUSED)
    if body.get("truncation") not in (None, "disabled"):
        raise wrong(
            "truncation", 'must be "disabled" or left out: this server drops nothing of the input'
        )


_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "reasoning_text": "text", "summary_text": "text"}  # fmt: skip
"""The field of each type of content part that holds its text."""


def to_chat(fields: ResponsesRequest) -> ChatCompletionRequest:
    """The instructions are not among the messages, since they do not belong to the stored
    conversation.

    Raises:
        RequestError: an item, tool or choice is not supported or malformed; names it.
    """
    shared: dict[str, Any] = {}
    if fields.max_output_tokens is not None:
        shared["max_tokens"] = fields.max_output_tokens
    answer_format = fields.text.format if fields.text else None
    if answer_format is not None:
        shared["response_format"] = _response_format(answer_format)
    reasoning = fields.reasoning
    return fields.translated(
        ChatCompletionRequest,
        **shared,
        continue_from=fields.previous_response_id or fields.continue_from,
        keep=is_stored(fields),
        messages=list(_messages(fields.input)),
        tools=_tools(fields.tools),
        tool_choice=_tool_choice(fields.tool_choice),
        reasoning_effort=fields.reasoning_effort or (reasoning.effort if reasoning else None),
        replay_reasoning=_replays(fields),
        logprobs=bool(fields.top_logprobs) or TEXT_LOGPROBS in (fields.include or ()) or None,
    )


def is_stored(fields: ResponsesRequest) -> bool:
    """A response whose id the client has chosen can be guessed, so it is not stored."""
    return fields.store is not False and fields.rid is None and fields.request_id is None


def _replays(fields: ResponsesRequest) -> bool:
    """A client without stored responses keeps the reasoning itself: it asks for it in ``include``,
    and sends it in its items."""
    if fields.replay_reasoning is not None:
        return fields.replay_reasoning
    items = fields.input if isinstance(fields.input, list) else []
    return (
        fields.store is not False
        or ENCRYPTED_REASONING in (fields.include or ())
        or any(item.get("type") == "reasoning" for item in items)
    )


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema":
        return given
    schema = {k: v for k, v in given.items() if k in ("name", "description", "schema", "strict")}
    return {"type": "json_schema", "json_schema": {k: v for k, v in schema.items() if v is not None}}  # fmt: skip


# ---------------------------------------------------------------- items


def _messages(items: Items | None) -> Iterator[ChatMessage]:
    """Reasoning, text and calls that follow each other are one message of the assistant."""
    if isinstance(items, str):
        yield ChatMessage(role="user", content=items)
        return
    open_turn: ChatMessage | None = None
    for index, item in enumerate(items or ()):
        where = f"input[{index}]"
        kind = "message" if item.get("type") is None else string_in(item, "type", where)
        read = _ITEMS.get(kind)
        if read is None:
            warn_of_skipped("items", kind)
            continue
        message = read(item, where)
        if message.role != "assistant":
            if open_turn is not None:
                yield open_turn
                open_turn = None
            yield message
        elif open_turn is None or (
            message.reasoning_content and (open_turn.content or open_turn.tool_calls)
        ):
            if open_turn is not None:
                yield open_turn
            open_turn = message
        else:
            _join(open_turn, message)
    if open_turn is not None:
        yield open_turn


def _join(turn: ChatMessage, message: ChatMessage) -> None:
    assert isinstance(turn.content, list) and isinstance(message.content, list)
    turn.content = turn.content + message.content
    turn.tool_calls = [*(turn.tool_calls or ()), *(message.tool_calls or ())] or None
    reasoning = (turn.reasoning_content or "") + (message.reasoning_content or "")
    turn.reasoning_content = reasoning or None


def _message(item: dict[str, Any], where: str) -> ChatMessage:
    role = string_in(item, "role", where)
    return ChatMessage(role=role, content=_parts(item.get("content"), f"{where}.content"))


def _function_call(item: dict[str, Any], where: str) -> ChatMessage:
    call = {
        "id": string_in(item, "call_id", where),
        "type": "function",
        "function": {
            "name": string_in(item, "name", where),
            "arguments": string_in(item, "arguments", where),
        },
    }
    return ChatMessage(role="assistant", content=[], tool_calls=[call])


def _custom_call(item: dict[str, Any], where: str) -> ChatMessage:
    custom = {name: string_in(item, name, where) for name in ("name", "input")}
    call = {"id": string_in(item, "call_id", where), "type": "custom", "custom": custom}
    return ChatMessage(role="assistant", content=[], tool_calls=[call])


def _call_output(item: dict[str, Any], where: str) -> ChatMessage:
    return ChatMessage(
        role="tool",
        tool_call_id=string_in(item, "call_id", where),
        content=_parts(item.get("output"), f"{where}.output"),
    )


def _reasoning(item: dict[str, Any], where: str) -> ChatMessage:
    """The text itself, if the client has kept it in one of its forms."""
    parts = _parts(item.get("content") or [], f"{where}.content")
    text = "".join(part.get("text", "") for part in parts)
    if not text and item.get("encrypted_content") is not None:
        text = _unsealed(string_in(item, "encrypted_content", where))
    if not text:
        parts = _parts(item.get("summary") or [], f"{where}.summary")
        text = "".join(part["text"] for part in parts)
    return ChatMessage(role="assistant", content=[], reasoning_content=text or None)


_ITEMS = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "reasoning": _reasoning,
}


def sealed(reasoning: str) -> str:
    """The form in which a client that keeps no text hands the reasoning back; it is no secret of
    the server."""
    return base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()


def _unsealed(content: str) -> str:
    """Reasoning that another server has encrypted is left out."""
    try:
        return base64.b64decode(content, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    return text_parts(content, where, _part)


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        return image_part(part, where)
    field = _TEXT_PARTS.get(str(kind))
    if field is None:
        raise wrong(where, f"is of type {kind!r:.50}; this server takes text and input_image")
    translated = {"type": "text", "text": string_in(part, field, where)}
    for name in ("cache_control", "prompt_cache_breakpoint"):
        if part.get(name) is not None:
            translated[name] = part[name]
    return translated


# ---------------------------------------------------------------- tools


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Functions and custom tools. Functions are strict unless the request says otherwise."""
    functions = []
    for index, tool in enumerate(tools or ()):
        if tool.get("type") == "custom":
            functions.append(_custom_tool(tool))
            continue
        if tool.get("type") != "function":
            warn_of_skipped("tools", tool.get("type"))
            continue
        function: dict[str, Any] = {"name": string_in(tool, "name", f"tools[{index}]")}
        for name in ("description", "parameters"):
            if tool.get(name) is not None:
                function[name] = tool[name]
        function["strict"] = tool.get("strict") is not False and "parameters" in function
        functions.append({"type": "function", "function": function})
    return functions or None


def _custom_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool in the form of chat completions, whose grammar is an object of its own."""
    custom = {name: tool[name] for name in ("name", "description", "format") if name in tool}
    given = custom.get("format")
    if isinstance(given, dict) and given.get("type") == "grammar":
        grammar = {name: value for name, value in given.items() if name != "type"}
        custom["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": custom}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") in ("function", "custom"):
        return _named(choice, "tool_choice")
    if choice.get("type") == "allowed_tools":
        allowed = choice.get("tools")
        if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed):
            raise wrong("tool_choice.tools", "must be a list of tools")
        named = [_named(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(allowed)]
        inner = {"mode": choice.get("mode", "auto"), "tools": named}
        return {"type": "allowed_tools", "allowed_tools": inner}
    raise wrong(
        "tool_choice",
        'must be "auto", "none", "required", or of the type function, custom or allowed_tools',
    )


def _named(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = "custom" if tool.get("type") == "custom" else "function"
    return {"type": kind, kind: {"name": string_in(tool, "name", where)}}
