"""``/v1/messages`` and ``/v1/messages/count_tokens``: events, and whole messages made of them."""

import base64
import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import orjson
from fastapi import Response

from radixrt.api.answering import Formatter, respond
from radixrt.api.anthropic.translation import (
    REFUSED,
    CountTokensRequest,
    MessagesRequest,
    to_chat,
)
from radixrt.api.conversations.continuation import Continuation
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import event, json_response
from radixrt.api.logprobs import KeptMass, chat_entries
from radixrt.api.openai.chat import PreparedChat, prepare_chat
from radixrt.api.requests.prompts import chat_prompt
from radixrt.api.requests.protocol import refuse_unsupported
from radixrt.api.requests.tools import call_delta
from radixrt.api.responses import report_extras
from radixrt.api.state import Context
from radixrt.base.errors import RequestError, wrong
from radixrt.messages.answers import AnswerChunk, AnswerReport
from radixrt.messages.calls import TokenizeCall

Event = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}

routes = Endpoints()
_refuse = partial(refuse_unsupported, also=REFUSED)


@routes.takes("/v1/messages", MessagesRequest, _refuse)
async def messages(fields: MessagesRequest, context: Context) -> Response:
    if fields.max_tokens is None:
        raise wrong("max_tokens", "is missing")
    config, chat = context.state.config, to_chat(fields)
    if config.reasoning_parser == "none" or chat.continue_final_message:
        chat.max_reasoning_tokens = fields.max_reasoning_tokens  # there is nothing to bound
    prepared = prepare_chat(chat, context, "msg")
    prepared.check_one_answer()
    return await respond(_Message(prepared, context.model_name), context)


@routes.takes("/v1/messages/count_tokens", CountTokensRequest, _refuse)
async def count_tokens(fields: CountTokensRequest, context: Context) -> Response:
    chat = to_chat(fields)
    continuation = Continuation.find(chat, "messages", context)
    prompt = chat_prompt(chat, chat.messages, continuation.messages)
    tokenized = await context.call(
        TokenizeCall(prompt, context.tenant, context.root(fields.cache_salt))
    )
    return json_response({"input_tokens": len(tokenized.token_ids)})


class _Message(Formatter):
    """The events of one message.

    At most one content block is open at a time: ``thinking``, ``text`` or ``tool_use``, in the
    order in which the model writes them.
    """

    def __init__(self, prepared: PreparedChat, model: str) -> None:
        super().__init__(prepared)
        self._chat = prepared
        self._model = model
        self._shows_thinking = prepared.fields.include_reasoning is not False
        self._begun = self._has_called = self._is_aborted = False
        self._kind: str | None = None
        """Type of the open block."""
        self._index = -1
        """Index of the open block, or of the last one."""
        self._space = ""
        """White space at the end of the text so far, which is dropped if a call follows it."""
        self._kept_mass = KeptMass()
        self._thinking = hashlib.sha256()

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[Event]:
        self._is_aborted = chunk.finish_reason == "abort"
        calls = [call_delta(call, "toolu") for call in chunk.tool_calls]
        kept = self._chat.record(chunk, chunk.text, calls)
        return self._events(chunk, calls, await chat_entries(chunk.logprobs), kept)

    def encoded(self, part: Event) -> bytes:
        return event(part, part["type"])

    def end(self) -> bytes:
        """Raises RequestError if the answer was aborted; the API has no other word for it."""
        if self._is_aborted:
            raise RequestError("The request was aborted.", status=499, code="request_aborted")
        return super().end()

    def whole(self, parts: list[Event]) -> dict[str, Any]:
        return _whole_message(parts)

    def _events(
        self,
        chunk: AnswerChunk,
        calls: list[dict[str, Any]],
        logprobs: list[orjson.Fragment],
        kept: dict[str, Any],
    ) -> Iterator[Event]:
        """The events that a chunk adds.

        Args:
            calls: the chunk's calls of tools as a chat would stream them.
            logprobs: JSON of each of its tokens, if the request asks for it.
            kept: fields beyond Anthropic's of the ``message_delta`` event.
        """
        report = chunk.report
        self._kept_mass.add(chunk.log_kept_masses)
        if not self._begun:
            self._begun = True
            yield self._message_start(report)
            yield {"type": "ping"}
        events = [*self._pieces(chunk, calls)]
        if logprobs and events:
            events[-1]["logprobs"] = {"content": logprobs, "refusal": None}
        yield from events
        if report.finish_reason in (None, "abort"):
            return
        if self._kind == "text" and self._space:
            yield self._delta(type="text_delta", text=self._space)
        yield from self._close()
        extras = report_extras(report, times=bool(self._chat.fields.return_times))
        extras |= self._kept_mass.whole()
        yield self._message_delta(report) | extras | kept
        yield {"type": "message_stop"}

    def _pieces(self, chunk: AnswerChunk, calls: list[dict[str, Any]]) -> Iterator[Event]:
        if chunk.reasoning and self._shows_thinking:
            yield from self._open({"type": "thinking", "thinking": "", "signature": ""})
            self._thinking.update(chunk.reasoning.encode("utf-8", "surrogatepass"))
            yield self._delta(type="thinking_delta", thinking=chunk.reasoning)
        text = self._space + chunk.text
        written = text.rstrip()
        self._space = text[len(written) :]
        if written:
            yield from self._open({"type": "text", "text": ""})
            yield self._delta(type="text_delta", text=written)
        for call in calls:
            function = call["function"]
            if "id" in call:
                self._space, self._has_called = "", True
                yield from self._close()
                block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                yield from self._open(block | {"input": {}})
            if function["arguments"]:
                yield self._delta(type="input_json_delta", partial_json=function["arguments"])

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        if self._kind == block["type"]:
            return
        yield from self._close()
        self._kind = block["type"]
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, **delta: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            signature = base64.b64encode(self._thinking.digest()).decode()
            yield self._delta(type="signature_delta", signature=signature)
        yield {"type": "content_block_stop", "index": self._index}
        self._kind = None

    def _message_start(self, report: AnswerReport) -> Event:
        message: dict[str, Any] = {
            "id": self.prepared.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(report),
        }
        return {"type": "message_start", "message": message}

    def _message_delta(self, report: AnswerReport) -> Event:
        stop_reason = _STOP_REASONS[report.finish_reason or "stop"]
        stop_sequence = None
        if report.finish_reason == "stop" and isinstance(report.stop_reason, str):
            stop_reason, stop_sequence = "stop_sequence", report.stop_reason
        elif report.finish_reason == "stop" and self._has_called:
            stop_reason = "tool_use"
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        return {"type": "message_delta", "delta": delta, "usage": _usage(report)}


def _usage(report: AnswerReport) -> dict[str, Any]:
    """Anthropic's ``usage``: the tokens of the prompt are the sum of its three counts of input
    tokens."""
    known = report.cached_tokens + report.cache_write_tokens
    return {
        "input_tokens": report.prompt_tokens - known,
        "cache_creation_input_tokens": report.cache_write_tokens,
        "cache_read_input_tokens": report.cached_tokens,
        "output_tokens": report.output_tokens,
    }


def _whole_message(events: Iterable[Event]) -> dict[str, Any]:
    """The message that a client makes of these events."""
    message: dict[str, Any] = {}
    logprobs: list[orjson.Fragment] = []
    arguments = ""
    for one in events:
        logprobs += (one.get("logprobs") or {}).get("content", ())
        match one:
            case {"type": "message_start"}:
                message = one["message"]
            case {"type": "content_block_start", "content_block": block}:
                message["content"].append(block)
                arguments = ""
            case {"type": "content_block_delta", "delta": delta}:
                block = message["content"][-1]
                arguments += delta.get("partial_json", "")
                for name in ("text", "thinking", "signature"):
                    if name in delta:
                        block[name] += delta[name]
            case {"type": "content_block_stop"} if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = _arguments(arguments)
            case {"type": "message_delta"}:
                message |= one["delta"]
                message |= {k: v for k, v in one.items() if k not in ("type", "delta")}
    if logprobs:
        message["logprobs"] = {"content": logprobs, "refusal": None}
    return message


def _arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; none if ``max_tokens`` has cut it off, which the stop reason
    says."""
    try:
        arguments: dict[str, Any] = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}
    return arguments
