"""An agent of each API: it calls a tool, sends the result back, and so on for some turns, through
the API's own client.

Every event is checked against the types of that client, which by itself checks nothing.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx
import ollama
import openai
import orjson
import pydantic
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2, "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
SYSTEM = "You look up the weather of cities with a tool, one city after the other. " * 4
TASK = "How is the weather in each city of the list?"
RESULT = "It rains there, and it is 12 degrees."
NEXT = "Go on with the next city."

_RESPONSE_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
_MESSAGE_EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)


@dataclass(frozen=True)
class Turn:
    """Counts of tokens of one request."""

    prompt: int
    cached: int
    output: int
    counted: int | None = None
    """The prompt's tokens as the API counts them beforehand, if it does."""


Agent = Callable[[str, str, dict[str, Any]], Iterator[Turn]]
"""Takes the server's URL, the model, and fields beyond the API's; each turn is one request."""


def chat(url: str, model: str, extra: dict[str, Any]) -> Iterator[Turn]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    function = {"name": "weather", "parameters": PARAMETERS, "strict": True}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    while True:
        content, calls, usage = "", {}, None  # type: ignore[var-annotated]
        for chunk in client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        ):
            _check(ChatCompletionChunk, chunk)
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for piece in choice.delta.tool_calls or ():
                    call = calls.setdefault(piece.index, {"id": piece.id, "name": "", "arguments": ""})  # fmt: skip
                    call["name"] += piece.function.name or ""
                    call["arguments"] += piece.function.arguments or ""
        assert usage is not None
        yield Turn(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)  # fmt: skip
        made = [
            {"id": call["id"], "type": "function", "function": {n: call[n] for n in ("name", "arguments")}}
            for call in calls.values()
        ]  # fmt: skip
        messages.append({"role": "assistant", "content": content or None, **({"tool_calls": made} if made else {})})  # fmt: skip
        results = [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in made]
        messages += results or [{"role": "user", "content": NEXT}]


def responses(url: str, model: str, extra: dict[str, Any], **fields: Any) -> Iterator[Turn]:
    """The client sends all items again in each turn."""
    items: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        response = _response(url, model, items, None, extra, **fields)
        yield _response_turn(response)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        items += _outputs(response)


def unstored_responses(url: str, model: str, extra: dict[str, Any]) -> Iterator[Turn]:
    """The server stores nothing, and the client keeps the reasoning."""
    included = ["reasoning.encrypted_content"]
    return responses(url, model, extra, store=False, include=included)


def chained_responses(url: str, model: str, extra: dict[str, Any]) -> Iterator[Turn]:
    """The client sends the new items only."""
    items: list[Any] = [{"role": "user", "content": TASK}]
    before: str | None = None
    while True:
        response = _response(url, model, items, before, extra)
        yield _response_turn(response)
        before, items = response.id, _outputs(response)


def _response(
    url: str,
    model: str,
    items: list[Any],
    before: str | None,
    extra: dict[str, Any],
    **fields: Any,
) -> Response:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    response: Response | None = None
    for event in client.responses.create(
        model=model,
        instructions=SYSTEM,
        input=items,
        tools=[tool],
        previous_response_id=before,
        stream=True,
        extra_body=extra,
        **fields,
    ):
        _RESPONSE_EVENT.validate_python(event.model_dump(warnings="error"))
        if event.type in ("response.completed", "response.incomplete"):
            response = event.response
    assert response is not None
    return response


def _response_turn(response: Response) -> Turn:
    used = response.usage
    assert used is not None
    return Turn(used.input_tokens, used.input_tokens_details.cached_tokens, used.output_tokens)


def _outputs(response: Response) -> list[Any]:
    calls = [item for item in response.output if item.type == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
        for call in calls
    ]
    return outputs or [{"role": "user", "content": NEXT}]


def messages(url: str, model: str, extra: dict[str, Any]) -> Iterator[Turn]:
    """As Claude Code: the first line of the system prompt differs in each request, and the marks
    move."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    history: list[Any] = [{"role": "user", "content": TASK}]
    tool: Any = {"name": "weather", "input_schema": PARAMETERS, "strict": True}
    for number in itertools.count():
        mark = {"cache_control": {"type": "ephemeral"}}
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"
        prompt: Any = {
            "system": [{"type": "text", "text": billing}, {"type": "text", "text": SYSTEM, **mark}],
            "messages": [*history[:-1], _marked(history[-1], mark)],
            "tools": [tool],
        }
        counted = client.messages.count_tokens(model=model, extra_body=extra, **prompt)
        blocks: list[dict[str, Any]] = []
        usage: dict[str, int] = {}
        for event in client.messages.create(
            model=model, max_tokens=300, stream=True, extra_body=extra, **prompt
        ):
            _MESSAGE_EVENT.validate_python(event.model_dump(warnings="error"))
            if event.type == "message_start":
                usage = event.message.usage.model_dump(exclude_none=True)
            elif event.type == "message_delta":
                usage |= event.usage.model_dump(exclude_none=True)
            else:
                _add_to(blocks, event)
        read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        total = usage["input_tokens"] + read + written
        yield Turn(total, read, usage["output_tokens"], counted.input_tokens)
        history.append({"role": "assistant", "content": blocks})
        calls = [block for block in blocks if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": RESULT} for call in calls]  # fmt: skip
        history.append({"role": "user", "content": results or NEXT})


def _add_to(blocks: list[dict[str, Any]], event: Any) -> None:
    if event.type == "content_block_start":
        blocks.append(event.content_block.model_dump(exclude_none=True) | {"json": ""})
    elif event.type == "content_block_delta":
        delta = event.delta.model_dump(exclude_none=True)
        blocks[-1]["json"] += delta.pop("partial_json", "")
        for name in ("text", "thinking", "signature"):
            if name in delta:
                blocks[-1][name] += delta[name]
    elif event.type == "content_block_stop":
        arguments = blocks[-1].pop("json")
        if blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = orjson.loads(arguments)


def native_ollama(url: str, model: str, extra: dict[str, Any]) -> Iterator[Turn]:
    """Over plain HTTP, since the client hides the number of cached tokens."""
    function = {"name": "weather", "description": "", "parameters": PARAMETERS}
    history: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    body = {"model": model, "tools": [{"type": "function", "function": function}], **extra}
    while True:
        answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        last: dict[str, Any] = {}
        with httpx.stream("POST", f"{url}/api/chat", json=body | {"messages": history}, timeout=60) as lines:  # fmt: skip
            for line in lines.iter_lines():
                last = orjson.loads(line)
                message = ollama.ChatResponse.model_validate(last).message
                answer["content"] += message.content or ""
                calls = [call.model_dump() for call in message.tool_calls or ()]
                answer["tool_calls"] += calls
        assert last["done"]
        yield Turn(last["prompt_eval_count"], last["cached_tokens"], last["eval_count"])
        history.append(answer)
        results = [
            {"role": "tool", "tool_name": call["function"]["name"], "content": RESULT}
            for call in answer["tool_calls"]
        ]
        history += results or [{"role": "user", "content": NEXT}]


AGENTS: dict[str, Agent] = {
    "chat": chat,
    "responses": responses,
    "responses with previous_response_id": chained_responses,
    "responses with store false": unstored_responses,
    "messages": messages,
    "ollama": native_ollama,
}


def _check(kind: type[pydantic.BaseModel], event: pydantic.BaseModel) -> None:
    kind.model_validate(event.model_dump(warnings="error"))


def _marked(message: dict[str, Any], mark: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {**message, "content": [*blocks[:-1], blocks[-1] | mark]}
