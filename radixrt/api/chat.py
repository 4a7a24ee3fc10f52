"""``/v1/chat/completions``: a conversation in, the next message out."""

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.conversation import to_template_messages
from radixrt.api.events import DONE, EventStream, event, json_response, while_connected
from radixrt.api.formats import Usage, chat_logprobs, prompt_extras
from radixrt.api.protocol import ChatCompletionRequest, refuse_unsupported
from radixrt.api.sampling import deadline, sampling_from_fields
from radixrt.api.state import ServerState, new_id, request_id
from radixrt.errors import RequestError
from radixrt.messages import AnswerChunk, ChatPrompt, GenerateRequest, ToolCall, unpack_ids
from radixrt.nesting import check_depth


def chat_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_json(request)
        refuse_unsupported(body)
        fields = to_struct(body, ChatCompletionRequest)
        state.check_model(fields.model)
        chat = _Chat.plan(fields, state)
        request.state.request_id = chat.request.request_id
        if fields.stream:
            return EventStream(_stream(chat, state))
        return json_response(await while_connected(request, _whole(chat, state)))

    return router


@dataclasses.dataclass(frozen=True)
class _Chat:
    """A request, ready to run."""

    fields: ChatCompletionRequest
    request: GenerateRequest

    @staticmethod
    def plan(fields: ChatCompletionRequest, state: ServerState) -> "_Chat":
        overrides: dict[str, Any] = {"logprobs": _logprobs(fields)}
        if fields.max_completion_tokens is not None:
            overrides["max_tokens"] = fields.max_completion_tokens
        sampling = sampling_from_fields(
            fields, state.default_sampling, state.info.vocab_size, **overrides
        )
        state.check_answer_count(1, sampling.n)
        request = GenerateRequest(
            request_id=request_id("chatcmpl", fields.rid, fields.request_id),
            prompt=chat_prompt(fields),
            sampling=sampling,
            stream=bool(fields.stream),
            cache_salt=fields.cache_salt or "",
            deadline=deadline(fields.timeout),
            return_prompt_token_ids=bool(fields.return_token_ids),
            parse_tool_calls=bool(fields.tools) and fields.tool_choice != "none",
        )
        return _Chat(fields, request)

    def choice_extras(self, chunk: AnswerChunk) -> dict[str, Any]:
        """The fields that a whole choice and a piece of one share."""
        extras: dict[str, Any] = {
            "logprobs": chat_logprobs(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        if self.fields.return_token_ids:
            extras["token_ids"] = unpack_ids(chunk.token_ids).tolist()
        return extras

    def envelope(self, state: ServerState, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.request.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": state.config.model_name,
            "choices": choices,
        }


def chat_prompt(fields: ChatCompletionRequest) -> ChatPrompt:
    """Raises:
    RequestError: the messages are not what a chat template can take.
    """
    _check_tools(fields.tools or [])
    check_depth(fields.chat_template_kwargs, "chat_template_kwargs")
    messages = to_template_messages(fields.messages)
    add_generation_prompt = fields.add_generation_prompt
    if fields.continue_final_message:
        if add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        if messages[-1]["role"] != "assistant":
            raise RequestError(
                "continue_final_message needs a last message of the assistant, to be continued.",
                param="continue_final_message",
            )
        add_generation_prompt = False
    template_kwargs = fields.chat_template_kwargs
    if fields.reasoning_effort is not None:
        template_kwargs = {"reasoning_effort": fields.reasoning_effort} | (template_kwargs or {})
    return ChatPrompt(
        messages=messages,
        tools=fields.tools if fields.tool_choice != "none" else None,
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(fields.continue_final_message),
        template_kwargs=template_kwargs,
    )


def _check_tools(tools: list[dict[str, Any]]) -> None:
    """Templates read the function's name and description, and fail at tools that have none."""
    check_depth(tools, "tools")
    for index, tool in enumerate(tools):
        where = f"tools[{index}].function"
        function = tool.get("function")
        if not isinstance(function, dict):
            raise RequestError(f"{where} must be an object with a name.", param=where)
        if not isinstance(function.get("name"), str):
            raise RequestError(f"{where}.name must be a string.", param=f"{where}.name")


def _logprobs(fields: ChatCompletionRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call"), "type": "function", "function": function}


def _reason_with_calls(chunk: AnswerChunk) -> str | None:
    """Of an answer that calls tools: those who asked are to run them."""
    return "tool_calls" if chunk.finish_reason == "stop" else chunk.finish_reason


async def _whole(chat: _Chat, state: ServerState) -> dict[str, Any]:
    usage = Usage()
    choices: list[dict[str, Any]] = []
    extras: dict[str, Any] = {}
    async with aclosing(state.generate([chat.request])) as answers:
        async for prompt_index, chunk in answers:
            usage.add(prompt_index, chunk)
            extras |= prompt_extras(chunk, bool(chat.fields.return_token_ids))
            message: dict[str, Any] = {"role": "assistant", "content": chunk.text, "refusal": None}
            choice = {"index": chunk.index, "message": message, **chat.choice_extras(chunk)}
            if chunk.tool_calls:
                message["content"] = chunk.text.strip() or None
                message["tool_calls"] = [_tool_call(call) for call in chunk.tool_calls]
                choice["finish_reason"] = _reason_with_calls(chunk)
            choices.append(choice)
    choices.sort(key=lambda choice: choice["index"])
    envelope = chat.envelope(state, "chat.completion", choices)
    return {**envelope, **extras, "usage": usage.as_json()}


async def _stream(chat: _Chat, state: ServerState) -> AsyncGenerator[bytes, None]:
    usage = Usage()
    options = chat.fields.stream_options
    begun: set[int] = set()
    """Choices whose role has been told."""
    called: set[int] = set()
    """Choices that have called a tool."""

    def piece(choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope = chat.envelope(state, "chat.completion.chunk", choices)
        if options and options.continuous_usage_stats:
            envelope["usage"] = usage.as_json()
        elif options and options.include_usage:
            envelope["usage"] = None
        return envelope

    async with aclosing(state.generate([chat.request])) as answers:
        async for prompt_index, chunk in answers:
            usage.add(prompt_index, chunk)
            if chunk.index not in begun:
                begun.add(chunk.index)
                start = {"role": "assistant", "content": ""}
                first = piece([{"index": chunk.index, "delta": start, "finish_reason": None}])
                yield event(first | prompt_extras(chunk, bool(chat.fields.return_token_ids)))
            delta: dict[str, Any] = {"content": chunk.text}
            choice = {"index": chunk.index, "delta": delta, **chat.choice_extras(chunk)}
            if chunk.tool_calls:
                called.add(chunk.index)
                delta["tool_calls"] = [
                    {"index": call.index, **_tool_call(call)} for call in chunk.tool_calls
                ]
            if chunk.index in called:
                choice["finish_reason"] = _reason_with_calls(chunk)
            yield event(piece([choice]))
    if options and options.include_usage:
        yield event(piece([]) | {"usage": usage.as_json()})
    yield DONE
