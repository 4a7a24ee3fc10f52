"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``, and their translation into the
chat request that has the same meaning."""

from collections.abc import Iterator
from typing import Any

import msgspec

from radixrt.api.requests.messages import (
    json_text,
    read_cache_control,
    string_in,
    text_parts,
    warn_of_skipped,
)
from radixrt.api.requests.protocol import (
    CacheControl,
    ChatCompletionRequest,
    ChatMessage,
    GenerationFields,
)
from radixrt.base.errors import wrong
from radixrt.base.image_parts import image_part

Blocks = str | list[dict[str, Any]]
"""Content: a text, or content blocks."""


class InputMessage(msgspec.Struct, kw_only=True):
    role: str
    """"user" or "assistant"; also "system", as some clients write it."""
    content: Blocks


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    """``reasoning_effort`` of chat."""
    format: dict[str, Any] | None = None
    """``{"type": "json_schema", "schema": ...}``."""


class Thinking(msgspec.Struct, kw_only=True):
    type: str
    """"enabled", "adaptive" or "disabled"; the template's variable ``enable_thinking``."""
    budget_tokens: int | None = None
    """``max_reasoning_tokens`` of chat; without effect where no reasoning is parsed."""
    display: str | None = None
    """"omitted": the reasoning is left out of the response."""


class MessagesRequest(GenerationFields, kw_only=True):
    """Anthropic's fields; those of :class:`GenerationFields` have the same meaning as in chat."""

    messages: list[InputMessage]
    system: Blocks | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The older form of ``output_config.format``."""
    cache_control: CacheControl | None = None
    """A cache breakpoint at the end of the last message."""

    # beyond Anthropic's, as in chat
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    replay_reasoning: bool | None = None


class CountTokensRequest(MessagesRequest, kw_only=True):
    """The fields of a request for a message, of which only those of the prompt are read."""


REFUSED = ("mcp_servers", "container", "inference_geo")
"""Fields that would change the answer, beside those that chat refuses."""


BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a line that Claude Code writes first into the system prompt. It differs in each request,
so no prefix would be shared."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


def to_chat(fields: MessagesRequest) -> ChatCompletionRequest:
    """
    Raises:
        RequestError: a content block, tool or choice is not supported or malformed; names it.
    """
    messages = [*_system(fields.system), *_messages(fields.messages)]
    if fields.cache_control is not None and messages:
        messages[-1].cache_control = fields.cache_control
    shared: dict[str, Any] = {}
    if fields.stop_sequences:
        shared["stop"] = fields.stop_sequences
    thinking = fields.thinking
    if thinking and thinking.type == "enabled" and fields.max_reasoning_tokens is None:
        shared["max_reasoning_tokens"] = thinking.budget_tokens
    output = fields.output_config
    answer_format = (output.format if output else None) or fields.output_format
    if answer_format is not None:
        shared["response_format"] = _response_format(answer_format)
    choice, parallel = _tool_choice(fields.tool_choice)
    return fields.translated(
        ChatCompletionRequest,
        **shared,
        messages=messages,
        tools=_tools(fields.tools),
        tool_choice=choice,
        parallel_tool_calls=parallel,
        continue_final_message=(bool(messages) and messages[-1].role == "assistant") or None,
        reasoning_effort=fields.reasoning_effort or (output.effort if output else None),
        chat_template_kwargs=_template_kwargs(fields),
        replay_reasoning=fields.replay_reasoning is not False,
        include_reasoning=not (thinking and thinking.display == "omitted"),
    )


def _template_kwargs(fields: MessagesRequest) -> dict[str, Any] | None:
    if fields.thinking is None:
        return fields.chat_template_kwargs
    if fields.thinking.type not in _THINKING:
        raise wrong(
            "thinking.type",
            f"must be one of {', '.join(_THINKING)}, not {fields.thinking.type!r:.50}",
        )
    chosen = {"enable_thinking": _THINKING[fields.thinking.type]}
    return chosen | (fields.chat_template_kwargs or {})


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "json_schema" or "schema" not in given:
        raise wrong("output_config.format", 'must be {"type": "json_schema", "schema": ...}')
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


# ---------------------------------------------------------------- messages


def _system(system: Blocks | None) -> Iterator[ChatMessage]:
    if isinstance(system, str):
        first, _, rest = system.partition("\n")
        system = rest if first.startswith(BILLING_HEADER) else system
    elif system is not None:
        system = [block for block in system if not _is_billing(block)]
    if system:
        yield ChatMessage(role="system", content=_texts(system, "system"))


def _is_billing(block: dict[str, Any]) -> bool:
    text = block.get("text")
    return isinstance(text, str) and text.startswith(BILLING_HEADER)


def _messages(messages: list[InputMessage]) -> Iterator[ChatMessage]:
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.role == "assistant":
            yield _assistant_message(message.content, f"{where}.content")
        elif message.role in ("user", "system"):
            yield from _user_messages(message, f"{where}.content")
        else:
            raise wrong(f"{where}.role", f"must be user or assistant, not {message.role!r:.50}")


def _user_messages(message: InputMessage, where: str) -> Iterator[ChatMessage]:
    """Results of tools are messages of their own in a chat; the texts between them stay
    together."""
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
        return
    texts: list[dict[str, Any]] = []
    for number, block in enumerate(message.content):
        if block.get("type") != "tool_result":
            texts += _texts([block], where, number)
            continue
        if texts:
            yield ChatMessage(role=message.role, content=texts)
            texts = []
        yield _result_message(block, f"{where}[{number}]")
    if texts or not message.content:
        yield ChatMessage(role=message.role, content=texts)


def _result_message(block: dict[str, Any], where: str) -> ChatMessage:
    content, mark = block.get("content") or "", block.get("cache_control")
    return ChatMessage(
        role="tool",
        tool_call_id=string_in(block, "tool_use_id", where),
        content=content if isinstance(content, str) else _texts(content, f"{where}.content"),
        cache_control=None if mark is None else read_cache_control(mark, f"{where}.cache_control"),
    )


def _assistant_message(content: Blocks, where: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage(role="assistant", content=content)
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for number, block in enumerate(content):
        place, kind = f"{where}[{number}]", block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, place))
        elif kind == "thinking":
            reasoning.append(string_in(block, "thinking", place))
        elif kind != "redacted_thinking":
            texts += _texts([block], where, number)
    return ChatMessage(
        role="assistant",
        content=texts,
        tool_calls=calls or None,
        reasoning_content="".join(reasoning) or None,
    )


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise wrong(f"{where}.input", "must be an object")
    call = {
        "id": string_in(block, "id", where),
        "type": "function",
        "function": {
            "name": string_in(block, "name", where),
            "arguments": json_text(arguments, f"{where}.input"),
        },
    }
    if "cache_control" in block:
        call["cache_control"] = block["cache_control"]
    return call


def _texts(blocks: Any, where: str, first: int = 0) -> list[dict[str, Any]]:
    return text_parts(blocks, where, _text, "content blocks", first)


def _text(block: Any, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {k: v for k, v in block.items() if k in ("type", "text", "cache_control")}
    if kind == "image":
        image = image_part(block, where)
        return image | {k: v for k, v in block.items() if k == "cache_control"}
    source = block.get("source") if kind == "document" else None
    if isinstance(source, dict) and source.get("type") == "text":
        part = {"type": "text", "text": string_in(source, "data", f"{where}.source")}
        return part | {k: v for k, v in block.items() if k == "cache_control"}
    raise wrong(
        where,
        f"is of type {kind!r:.50}; this server takes text, images, plain-text documents, tool_use, tool_result and thinking "
        "blocks",
    )


# ---------------------------------------------------------------- tools


def _tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The tools that the client runs. A mark on any of them keeps all of them, so it moves to the
    last."""
    if not tools:
        return None
    own = [tool for tool in tools if tool.get("type") in (None, "custom")]
    for tool in tools:
        if tool.get("type", "custom") != "custom":
            warn_of_skipped("tools", tool["type"])
    translated = [_tool(tool, index) for index, tool in enumerate(own)]
    marks = [tool["cache_control"] for tool in own if tool.get("cache_control")]
    if marks:
        translated[-1]["cache_control"] = marks[-1]
    return translated or None


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    function = {"name": string_in(tool, "name", f"tools[{index}]")}
    for theirs, ours in (("description", "description"), ("input_schema", "parameters"), ("strict", "strict")):  # fmt: skip
        if tool.get(theirs) is not None:
            function[ours] = tool[theirs]
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """``tool_choice`` and ``parallel_tool_calls`` of chat."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") else None
    kind = choice.get("type")
    if kind == "tool":
        name = string_in(choice, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}, parallel
    if not isinstance(kind, str) or kind not in _TOOL_CHOICES:
        raise wrong("tool_choice.type", f"must be auto, any, tool or none, not {kind!r:.50}")
    return _TOOL_CHOICES[kind], parallel
