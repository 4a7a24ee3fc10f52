"""``/v1/responses``: makes, retrieves and deletes responses, and turns chunks into their events."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson
from fastapi import Response

from radixrt.api.answering import Formatter, respond
from radixrt.api.conversations.continuation import access_key_of
from radixrt.api.conversations.store import CONVERSATION_GONE, conversation_gone
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import as_request_error
from radixrt.api.http.events import event, json_response
from radixrt.api.http.middleware import new_id
from radixrt.api.logprobs import KeptMass, chat_entries
from radixrt.api.openai.chat import PreparedChat, prepare_chat
from radixrt.api.openai_responses.translation import (
    ENCRYPTED_REASONING,
    ResponsesRequest,
    is_stored,
    refuse_unsupported_fields,
    sealed,
    to_chat,
)
from radixrt.api.requests.messages import json_text
from radixrt.api.requests.tools import CustomCalls, call_delta
from radixrt.api.responses import report_extras
from radixrt.api.state import Context, Here
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.messages.answers import AnswerChunk, AnswerReport

Event = dict[str, Any]


class _CallForm(NamedTuple):
    item: str
    """Type of the output item."""
    id_prefix: str
    text: str
    """Its field that the deltas add to."""
    events: str


_CALLS = {
    "function": _CallForm("function_call", "fc", "arguments", "function_call_arguments"),
    "custom": _CallForm("custom_tool_call", "ctc", "input", "custom_tool_call_input"),
}
"""The form of a call, by the kind of tool."""

routes = Endpoints()


@routes.takes("/v1/responses", ResponsesRequest, refuse_unsupported_fields)
async def responses(fields: ResponsesRequest, context: Context) -> Response:
    with _unknown_response(400, "previous_response_id"):
        prepared = prepare_chat(to_chat(fields), context, "resp", fields.instructions or "")
    prepared.check_one_answer()
    made = _Response(prepared, fields, context.model_name)
    json_text(made.response)  # the response returns its metadata, tools and format
    return await respond(made, context)


@routes.get("/v1/responses/{response_id}")
async def retrieve_response(
    response_id: str, context: Here, cache_salt: str | None = None
) -> Response:
    with _unknown_response(404, "response_id"):
        key = _access_key(context, cache_salt)
        found = context.state.conversations.find(response_id, key)
        if not found.response:
            raise conversation_gone()
    return Response(found.response, media_type="application/json")


@routes.delete("/v1/responses/{response_id}")
async def delete_response(
    response_id: str, context: Here, cache_salt: str | None = None
) -> Response:
    with _unknown_response(404, "response_id"):
        context.state.conversations.hide(response_id, _access_key(context, cache_salt))
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _access_key(context: Context, cache_salt: str | None) -> bytes:
    """The access key of a request whose body has this salt."""
    return access_key_of(context.caller, cache_salt)


@contextmanager
def _unknown_response(status: int, param: str) -> Iterator[None]:
    """Let errors about a kept conversation speak of a response."""
    try:
        yield
    except RequestError as error:
        if error.code != CONVERSATION_GONE:
            raise
        raise RequestError(
            "This response is not stored, or not any more.",
            status=status,
            param=param,
            code="previous_response_not_found" if status == 400 else None,
        ) from error


class _Response(Formatter):
    """The events of one response.

    An event holds items that later events change, so it has to be encoded before the next one is
    taken. At most one output item is open at a time: ``reasoning``, ``message``, ``function_call``
    or ``custom_tool_call``, in the order in which the model writes them.

    Attributes:
        response: the response so far; complete after the last chunk.
    """

    def __init__(self, prepared: PreparedChat, fields: ResponsesRequest, model: str) -> None:
        super().__init__(prepared)
        self._chat = prepared
        self._custom = CustomCalls(prepared.fields.tools)
        self.response = _new_response(fields, prepared, model)
        reasoning = fields.reasoning
        self._summarizes = bool(reasoning and (reasoning.summary or reasoning.generate_summary))
        self._seals = ENCRYPTED_REASONING in (fields.include or ())
        self._returns_times = bool(fields.return_times)
        self._number = 0
        """Events so far."""
        self._item: dict[str, Any] = {}
        """The open item; empty: none."""
        self._space = ""
        """White space at the end of the text so far, which is dropped if a call follows it."""
        self._kept_mass = KeptMass()

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[Event]:
        return self._events(chunk, await chat_entries(chunk.logprobs))

    def encoded(self, part: Event) -> bytes:
        return event(part, part["type"])

    def whole(self, parts: list[Event]) -> dict[str, Any]:
        return self.response

    def failed(self, error: RequestError | EngineDiedError) -> bytes:
        if not (self._streams and self._number):
            raise error
        return self.encoded(self._failure(as_request_error(error)))

    def _events(self, chunk: AnswerChunk, logprobs: list[orjson.Fragment]) -> Iterator[Event]:
        """The events that a chunk adds.

        Args:
            logprobs: JSON of each of its tokens, if the request asks for it.
        """
        self._kept_mass.add(chunk.log_kept_masses)
        if self._number == 0:
            yield self._event("created", response=self.response)
            yield self._event("in_progress", response=self.response)
        if chunk.reasoning:
            yield from self._reason(chunk.reasoning)
        text = self._space + chunk.text
        written = text.rstrip()
        self._space = text[len(written) :]
        if written:
            yield from self._write(written, logprobs)
        calls = [call_delta(call) for call in chunk.tool_calls]
        for call in self._custom.client_calls(calls):
            yield from self._call(call)
        if chunk.finish_reason is not None:
            if self._kind == "message" and self._space:
                yield from self._write(self._space, [])
            yield from self._finish(chunk.report)
        response = b"" if chunk.finish_reason is None else orjson.dumps(self.response)
        self._chat.record(chunk, chunk.text, calls, response)

    def _failure(self, error: RequestError) -> Event:
        """The event that ends a response that has begun and can't go on."""
        failure = {"code": error.code or "server_error", "message": error.message}
        self.response |= {"status": "failed", "error": failure}
        return self._event("failed", response=self.response)

    # ------------------------------------------------------------ items

    def _reason(self, text: str) -> Iterator[Event]:
        if self._kind != "reasoning":
            item: dict[str, Any] = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            item |= {} if self._summarizes else {"content": []}
            item |= {"encrypted_content": None} if self._seals else {}
            kind = "summary_text" if self._summarizes else "reasoning_text"
            yield from self._open(item, {"type": kind, "text": ""})
        self._part["text"] += text
        yield self._part_event("text.delta", delta=text)

    def _write(self, text: str, logprobs: list[orjson.Fragment]) -> Iterator[Event]:
        if self._kind != "message":
            item = {"id": new_id("msg"), "type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield from self._open(item, part)
        self._part["text"] += text
        self._part["logprobs"] += logprobs
        yield self._part_event("text.delta", delta=text, logprobs=logprobs)

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        kind = "custom" if "custom" in call else "function"
        called, form = call[kind], _CALLS[kind]
        if "id" in call:
            self._space = ""
            item = {"id": new_id(form.id_prefix), "type": form.item, "call_id": call["id"]}
            yield from self._open(item | {"name": called["name"], form.text: ""})
        if delta := called[form.text]:
            self._item[form.text] += delta
            yield self._item_event(f"{form.events}.delta", delta=delta)

    @property
    def _kind(self) -> str:
        """Type of the open item; "": none is open."""
        return str(self._item.get("type", ""))

    @property
    def _is_summary(self) -> bool:
        return self._summarizes and self._kind == "reasoning"

    @property
    def _part(self) -> dict[str, Any]:
        """The content part of the open item."""
        part: dict[str, Any] = self._item["summary" if self._is_summary else "content"][0]
        return part

    def _open(self, item: dict[str, Any], part: dict[str, Any] | None = None) -> Iterator[Event]:
        """Begin an item, and its content part, if it has one."""
        yield from self._close()
        item["status"] = "in_progress"
        self._item = item
        self.response["output"].append(item)
        yield self._event("output_item.added", output_index=self._output_index, item=item)
        if part is not None:
            item["summary" if self._is_summary else "content"].append(part)
            yield self._part_event("part.added", part=part | {})

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item."""
        if not self._item:
            return
        item = self._item
        if self._kind == "function_call":
            done = {name: item[name] for name in ("name", "arguments")}
            yield self._item_event("function_call_arguments.done", **done)
        elif self._kind == "custom_tool_call":
            yield self._item_event("custom_tool_call_input.done", input=item["input"])
        else:
            part = self._part
            logprobs = {} if self._kind == "reasoning" else {"logprobs": part["logprobs"]}
            if self._kind == "reasoning" and self._seals:
                item["encrypted_content"] = sealed(part["text"])
            yield self._part_event("text.done", text=part["text"], **logprobs)
            yield self._part_event("part.done", part=part)
        item["status"] = status
        yield self._event("output_item.done", output_index=self._output_index, item=item)
        self._item = {}

    def _finish(self, report: AnswerReport) -> Iterator[Event]:
        cut = report.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        yield from self._close(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": _usage(report),
            **report_extras(report, times=self._returns_times),
            **self._kept_mass.whole(),
        }
        if report.finish_reason == "abort":
            aborted = RequestError("The request was aborted.", code="request_aborted")
            yield self._failure(aborted)
            return
        yield self._event(status, response=self.response)

    @property
    def _output_index(self) -> int:
        return len(self.response["output"]) - 1

    def _part_event(self, kind: str, **fields: Any) -> Event:
        """An event about the content part of the open item.

        Args:
            kind: "part" or "text", a dot, and what has happened to it.
        """
        if self._is_summary:
            return self._item_event(f"reasoning_summary_{kind}", summary_index=0, **fields)
        what = {"message": "output", "reasoning": "reasoning"}[self._kind]
        name = "content" if kind.startswith("part.") else what
        return self._item_event(f"{name}_{kind}", content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """An event about the open item."""
        ids = {"item_id": self._item["id"], "output_index": self._output_index}
        return self._event(kind, **ids, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _usage(report: AnswerReport) -> dict[str, Any]:
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": report.cached_tokens,
            "cache_write_tokens": report.cache_write_tokens,
        },
        "output_tokens": report.output_tokens,
        "output_tokens_details": {"reasoning_tokens": report.reasoning_tokens},
        "total_tokens": report.prompt_tokens + report.output_tokens,
    }


def _new_response(fields: ResponsesRequest, prepared: PreparedChat, model: str) -> dict[str, Any]:
    reasoning, sampling = fields.reasoning, prepared.requests[0].sampling
    same = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "safety_identifier", "user")  # fmt: skip
    return {
        "id": prepared.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "store": is_stored(fields),
        "temperature": sampling.temperature,
        "text": {"format": (fields.text and fields.text.format) or {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": fields.tools or [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        **{name: getattr(fields, name) for name in same},
    }
