"""``/v1/chat/completions``: a conversation in, the next message out."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.cache_control import cache_breakpoints, without_cache_control
from radixrt.api.continuation import Continuation, Keeper, owner_of
from radixrt.api.conversation import to_template_messages
from radixrt.api.events import DONE, EventStream, event, json_response, while_connected
from radixrt.api.formats import Usage, chat_logprobs, prompt_extras, times_extras
from radixrt.api.protocol import ChatCompletionRequest, refuse_unsupported
from radixrt.api.sampling import deadline, priority, sampling_from_fields
from radixrt.api.state import ServerState, request_id
from radixrt.api.structured import (
    asked_constraint,
    constraint_field,
    structured_extras,
)
from radixrt.api.tools import (
    call_as_json,
    call_delta,
    calls_tools,
    offered_tools,
    tool_constraint,
)
from radixrt.cache_hint import hints_of
from radixrt.constrained.requests import check_sampling
from radixrt.constrained.spec import Spec
from radixrt.constrained.tool_calls import FORMATS
from radixrt.errors import RequestError
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import ChatPrompt, GenerateRequest
from radixrt.nesting import check_depth


def chat_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_json(request)
        refuse_unsupported(body)
        fields = to_struct(body, ChatCompletionRequest)
        state.check_model(fields.model)
        chat = _Chat.plan(fields, state, owner_of(request, fields.cache_salt))
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
    keeper: Keeper | None
    """Of a conversation that is to be remembered."""

    @staticmethod
    def plan(fields: ChatCompletionRequest, state: ServerState, owner: bytes) -> "_Chat":
        overrides: dict[str, Any] = {"logprobs": _logprobs(fields)}
        if fields.max_completion_tokens is not None:
            overrides["max_tokens"] = fields.max_completion_tokens
        sampling = sampling_from_fields(
            fields, state.default_sampling, state.info.vocab_size, **overrides
        )
        state.check_answer_count(1, sampling.n)
        continuation = Continuation.of(fields, "messages", owner, state.conversations)
        prompt = chat_prompt(fields, continuation.messages)
        written = state.config.tool_call_parser
        structured = asked_constraint(fields, state.config)
        structured = tool_constraint(fields, FORMATS[written], structured)
        check_sampling(structured, sampling)
        request = GenerateRequest(
            request_id=request_id("chatcmpl", fields.rid, fields.request_id),
            prompt=prompt,
            sampling=sampling,
            stream=bool(fields.stream),
            cache_salt=fields.cache_salt or "",
            priority=priority(fields.priority, state.config),
            cache_hints=hints_of(fields.cache),
            deadline=deadline(fields.timeout),
            return_prompt_token_ids=bool(fields.return_token_ids),
            parse_tool_calls=written if calls_tools(fields) else "",
            structured=structured,
            parse_reasoning=_reasoning_parser(fields, state, structured),
        )
        return _Chat(
            fields, request, _keeper(fields, request.request_id, prompt, continuation, state)
        )

    def choice_extras(self, chunk: AnswerChunk) -> dict[str, Any]:
        """The fields that a whole choice and a piece of one share."""
        extras: dict[str, Any] = {
            "logprobs": chat_logprobs(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        if self.fields.return_token_ids:
            extras["token_ids"] = unpack_ids(chunk.token_ids).tolist()
        return extras | structured_extras(chunk)

    @property
    def tells_reasoning(self) -> bool:
        return bool(self.request.parse_reasoning) and self.fields.include_reasoning is not False

    def message(self, chunk: AnswerChunk) -> dict[str, Any]:
        """A whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": chunk.text, "refusal": None}
        if self.tells_reasoning:
            message["reasoning_content"] = chunk.reasoning or None
        if chunk.tool_calls:
            message["content"] = chunk.text.strip() or None
            message["tool_calls"] = [call_as_json(call) for call in chunk.tool_calls]
        return message

    def delta(self, chunk: AnswerChunk) -> dict[str, Any]:
        """A piece of an answer."""
        delta: dict[str, Any] = {"content": chunk.text}
        if self.tells_reasoning and chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.tool_calls:
            delta["tool_calls"] = [call_delta(call) for call in chunk.tool_calls]
        return delta

    def first_answer(self, told: dict[str, Any], chunk: AnswerChunk) -> dict[str, Any]:
        """Take note of (a piece of) the first answer; what the response says beside it.

        Args:
            told: the message, or the piece of one, that the client gets.
        """
        extras = times_extras(chunk) if self.fields.return_times else {}
        if self.keeper is not None:
            self.keeper.add(told, chunk)
            if chunk.finish_reason is not None:
                extras["kept"] = self.keeper.end(chunk.finish_reason)
        return extras

    def envelope(self, state: ServerState, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.request.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": state.config.model_name,
            "choices": choices,
        }


def chat_prompt(
    fields: ChatCompletionRequest, remembered: Sequence[dict[str, Any]] = ()
) -> ChatPrompt:
    """
    Args:
        remembered: messages that come before the request's own.

    Raises:
        RequestError: there are none, or they are not what a chat template can take.
    """
    tools = offered_tools(fields)
    check_depth(fields.chat_template_kwargs, "chat_template_kwargs")
    messages = [*remembered, *to_template_messages(fields.messages)]
    if not messages:
        raise RequestError("messages is empty; give at least one message.", param="messages")
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
        tools=without_cache_control(tools),
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(fields.continue_final_message),
        template_kwargs=template_kwargs,
        cache_breakpoints=cache_breakpoints(fields.messages, tools, len(remembered)),
    )


def _keeper(
    fields: ChatCompletionRequest,
    response_id: str,
    prompt: ChatPrompt,
    continuation: Continuation,
    state: ServerState,
) -> Keeper | None:
    if not fields.keep:
        return None
    new = prompt.messages[continuation.taken :]
    return Keeper(
        state.conversations, response_id, continuation, new, bool(fields.continue_final_message)
    )


def _logprobs(fields: ChatCompletionRequest) -> int | None:
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return None


def _reasoning_parser(
    fields: ChatCompletionRequest, state: ServerState, structured: Spec | None
) -> str:
    """How the thought is marked that is to be taken out of the answer; "" if it is not."""
    if state.config.reasoning_parser == "none" or fields.continue_final_message:
        return ""
    if fields.separate_reasoning is not False:
        return state.config.reasoning_parser
    if structured is not None:
        raise RequestError(
            "separate_reasoning must not be false with structured output or tools: what the answer is held to begins "
            "after the thought. To have no thought in the response, set include_reasoning to false.",
            param="separate_reasoning",
        )
    return ""


def _reason_with_calls(chunk: AnswerChunk) -> str | None:
    """Of an answer that calls tools: those who asked are to run them."""
    return "tool_calls" if chunk.finish_reason == "stop" else chunk.finish_reason


async def _whole(chat: _Chat, state: ServerState) -> dict[str, Any]:
    usage = Usage()
    choices: list[dict[str, Any]] = []
    extras: dict[str, Any] = {}
    async with aclosing(state.generate([chat.request], constraint_field(chat.fields))) as answers:
        async for prompt_index, chunk in answers:
            usage.add(prompt_index, chunk)
            extras |= prompt_extras(chunk, bool(chat.fields.return_token_ids))
            extra = chat.choice_extras(chunk)
            message = chat.message(chunk)
            choice = {"index": chunk.index, "message": message, **extra}
            if chunk.index == 0:
                extras |= chat.first_answer(message, chunk)
            if chunk.tool_calls:
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

    async with aclosing(state.generate([chat.request], constraint_field(chat.fields))) as answers:
        async for prompt_index, chunk in answers:
            usage.add(prompt_index, chunk)
            if chunk.index not in begun:
                begun.add(chunk.index)
                start = {"role": "assistant", "content": ""}
                first = piece([{"index": chunk.index, "delta": start, "finish_reason": None}])
                yield event(first | prompt_extras(chunk, bool(chat.fields.return_token_ids)))
            extra = chat.choice_extras(chunk)
            delta = chat.delta(chunk)
            choice = {"index": chunk.index, "delta": delta, **extra}
            if chunk.tool_calls:
                called.add(chunk.index)
            if chunk.index in called:
                choice["finish_reason"] = _reason_with_calls(chunk)
            told = chat.first_answer(delta, chunk) if chunk.index == 0 else {}
            yield event(piece([choice]) | told)
    if options and options.include_usage:
        yield event(piece([]) | {"usage": usage.as_json()})
    yield DONE
