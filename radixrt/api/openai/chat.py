"""``/v1/chat/completions``: the next message of a conversation."""

from collections import defaultdict
from typing import Any

from fastapi import Response

from radixrt.api.answering import ChoiceDelta, OpenAIFormatter, PreparedRequest, respond
from radixrt.api.conversations.continuation import Continuation
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.logprobs import KeptMass, chat_logprobs
from radixrt.api.requests.constraint import asked_constraint, streams_values
from radixrt.api.requests.options import generation_options, request_id, wants_receipt
from radixrt.api.requests.prompts import chat_prompt
from radixrt.api.requests.protocol import ChatCompletionRequest
from radixrt.api.requests.tools import (
    CustomCalls,
    call_as_json,
    call_delta,
    calls_tools,
    tool_constraint,
)
from radixrt.api.responses import (
    prompt_extras,
    receipt_extras,
    structured_extras,
    value_events,
)
from radixrt.api.state import Context, ServerState
from radixrt.base.errors import shown, wrong
from radixrt.base.sampling_params import MAX_LOGPROBS
from radixrt.constrained.constraint import Constraint
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import GenerateRequest
from radixrt.parsers.tool_calls.registry import FORMATS

routes = Endpoints()


@routes.takes("/v1/chat/completions", ChatCompletionRequest)
async def chat_completions(fields: ChatCompletionRequest, context: Context) -> Response:
    prepared = prepare_chat(fields, context)
    return await respond(_Chat(prepared, context.state), context)


PreparedChat = PreparedRequest[ChatCompletionRequest]


def prepare_chat(
    fields: ChatCompletionRequest,
    context: Context,
    id_prefix: str = "chatcmpl",
    instructions: str = "",
) -> PreparedChat:
    """Read a chat request, in OpenAI's form or translated from another API's.

    Args:
        instructions: a system message before all messages, which is not kept with them.

    Raises:
        RequestError: a field is out of its range, or does not fit the others; names it.
    """
    config = context.state.config
    continuation = Continuation.find(fields, "messages", context)
    prompt = chat_prompt(fields, fields.messages, continuation.messages, instructions=instructions)
    asked = asked_constraint(fields, config)
    constraint, field = tool_constraint(fields, FORMATS.get(config.tool_call_parser), asked)
    max_tokens = fields.max_completion_tokens
    overrides: dict[str, Any] = {
        "logprobs": _logprobs(fields),
        "max_tokens": fields.max_tokens if max_tokens is None else max_tokens,
    }
    generate = GenerateRequest(
        request_id=request_id(id_prefix, fields.rid, fields.request_id),
        prompt=prompt,
        options=generation_options(fields, context, constraint, **overrides),
        stream=bool(fields.stream),
        return_prompt_token_ids=bool(fields.return_token_ids),
        parse_tool_calls=config.tool_call_parser if calls_tools(fields) else "",
        constraint=constraint,
        parse_reasoning=_reasoning_parser(fields, config.reasoning_parser, constraint),
        stream_values=streams_values(fields, constraint),
        receipt=wants_receipt(fields, context),
        prediction="" if fields.prediction is None else fields.prediction.text(),
    )
    new = prompt.messages[bool(instructions) + continuation.taken :]
    recorder = continuation.recorder(
        fields, generate.request_id, new, prompt.continue_final_message
    )
    return PreparedRequest(generate.request_id, [generate], field, fields, recorder)


class _Chat(OpenAIFormatter[ChatCompletionRequest]):
    kind = "chat.completion"
    kind_of_event = "chat.completion.chunk"

    def __init__(self, prepared: PreparedChat, state: ServerState) -> None:
        super().__init__(prepared, state)
        (request,) = prepared.requests
        self._shows_reasoning = (
            request.parse_reasoning and self.fields.include_reasoning is not False
        )
        self._begun: set[int] = set()
        """Streamed choices whose role has been sent."""
        self._called: set[int] = set()
        """Choices that have called a tool."""
        self._kept_mass: defaultdict[int, KeptMass] = defaultdict(KeptMass)
        self._custom: defaultdict[int, CustomCalls] = defaultdict(
            lambda: CustomCalls(self.fields.tools)
        )
        """Gives each choice's calls their form."""

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> list[ChoiceDelta]:
        if chunk.progress is not None:
            return [self.progress(prompt_index, chunk, {"delta": {}})]
        self._usage.add(prompt_index, chunk)
        found: list[ChoiceDelta] = []
        extras = await prompt_extras(chunk, bool(self.fields.return_token_ids))
        if self.fields.stream and chunk.index not in self._begun:
            self._begun.add(chunk.index)
            start = {"role": "assistant", "content": ""}
            found.append(({"index": chunk.index, "delta": start, "finish_reason": None}, extras))
            extras = {}
        if chunk.tool_calls:
            self._called.add(chunk.index)
        message = self._delta(chunk) if self.fields.stream else self._message(chunk)
        calls = message.get("tool_calls", [])
        if chunk.index == 0:
            extras |= self.beside_first(chunk, message["content"] or "", calls)
        if calls:
            message["tool_calls"] = self._custom[chunk.index].client_calls(calls)
        choice = {
            "index": chunk.index,
            "delta" if self.fields.stream else "message": message,
            "logprobs": await chat_logprobs(chunk.logprobs),
            "finish_reason": self._finish_reason(chunk),
            "stop_reason": chunk.report.stop_reason,
        }
        if self.fields.return_token_ids:
            choice["token_ids"] = unpack_ids(chunk.token_ids).tolist()
        choice |= self._kept_mass[chunk.index].after(chunk.log_kept_masses)
        choice |= value_events(chunk) | structured_extras(chunk.report) | receipt_extras(chunk)
        return [*found, (choice, extras)]

    def _finish_reason(self, chunk: AnswerChunk) -> str | None:
        if chunk.finish_reason == "stop" and chunk.index in self._called:
            return "tool_calls"  # the client runs them
        return chunk.finish_reason

    def _message(self, chunk: AnswerChunk) -> dict[str, Any]:
        """A whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": chunk.text, "refusal": None}
        if self._shows_reasoning:
            message["reasoning"] = message["reasoning_content"] = chunk.reasoning or None
        if chunk.tool_calls:
            message["content"] = chunk.text.strip() or None
            message["tool_calls"] = [call_as_json(call) for call in chunk.tool_calls]
        return message

    def _delta(self, chunk: AnswerChunk) -> dict[str, Any]:
        """A piece of an answer."""
        delta: dict[str, Any] = {"content": chunk.text}
        if self._shows_reasoning and chunk.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = chunk.reasoning
        if chunk.tool_calls:
            delta["tool_calls"] = [call_delta(call) for call in chunk.tool_calls]
        return delta


def _logprobs(fields: ChatCompletionRequest) -> int | None:
    if fields.logprobs:
        wanted = fields.top_logprobs or 0
        if not 0 <= wanted <= MAX_LOGPROBS:
            raise wrong(
                "top_logprobs", f"must be a number from 0 to {MAX_LOGPROBS}, not {shown(wanted)}"
            )
        return wanted
    if fields.top_logprobs:
        raise wrong("top_logprobs", "needs logprobs to be true")
    return None


def _reasoning_parser(
    fields: ChatCompletionRequest, parser: str, structured: Constraint | None
) -> str:
    """The parser that takes the reasoning out of the answer; "": the reasoning stays in its
    text."""
    if parser == "none" or fields.continue_final_message:
        return ""
    if fields.separate_reasoning is not False:
        return parser
    if structured is not None:
        raise wrong(
            "separate_reasoning",
            "must not be false with structured output or tools, since the constraint begins "
            "after the reasoning. To have no reasoning in the response, set include_reasoning to false",
        )
    return ""
