"""``/v1/responses``: makes, retrieves and deletes responses, and turns chunks into their events."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson
from fastapi import APIRouter, Request, Response

from radixrt.api.answering import Formatter, respond
from radixrt.api.conversations.continuation import access_key_of
from radixrt.api.conversations.store import CONVERSATION_GONE, conversation_gone
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.errors import as_request_error
from radixrt.api.http.events import event, json_response
from radixrt.api.http.keys import caller_of
from radixrt.api.http.middleware import new_id
from radixrt.api.logprobs import chat_entries
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
from radixrt.api.responses import explanation_extras, structured_extras, times_extras
from radixrt.api.state import ServerState
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.answers import AnswerChunk, AnswerReport


def response_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/v1/responses", ResponsesRequest, refuse_unsupported_fields)
    async def responses(request: Request, fields: ResponsesRequest) -> Response:
        with _unknown_response(400, "previous_response_id"):
            instructions = fields.instructions or ""
            prepared = prepare_chat(to_chat(fields), state, request, "resp", instructions)
        prepared.check_one_answer()
        sampling = prepared.requests[0].sampling
        made = ResponseEvents(fields, prepared.id, state.config.model_name, sampling)
        json_text(made.response)  # the response returns its metadata, tools and format
        return await respond(_Response(made, prepared), prepared, request, state)

    @router.get("/v1/responses/{response_id}")
    async def retrieve_response(
        request: Request, response_id: str, cache_salt: str | None = None
    ) -> Response:
        with _unknown_response(404, "response_id"):
            found = state.conversations.find(response_id, _access_key(request, cache_salt))
            if not found.response:
                raise conversation_gone()
        return Response(found.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete_response(
        request: Request, response_id: str, cache_salt: str | None = None
    ) -> Response:
        with _unknown_response(404, "response_id"):
            state.conversations.hide(response_id, _access_key(request, cache_salt))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return router


def _access_key(request: Request, cache_salt: str | None) -> bytes:
    """The access key of a request whose body has this salt."""
    return access_key_of(request, caller_of(request).tenant.salt(cache_salt))


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
    def __init__(self, made: ResponseEvents, prepared: PreparedChat) -> None:
        super().__init__(prepared)
        self._made = made
        self._prepared = prepared
        self._custom = CustomCalls(prepared.fields.tools)
        self._has_begun = False

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> Iterator[Event]:
        self._has_begun = True
        return self._events(chunk, await chat_entries(chunk.logprobs))

    def _events(self, chunk: AnswerChunk, logprobs: list[orjson.Fragment]) -> Iterator[Event]:
        calls = [call_delta(call) for call in chunk.tool_calls]
        yield from self._made.from_chunk(chunk, self._custom.client_calls(calls), logprobs)
        response = b"" if chunk.finish_reason is None else orjson.dumps(self._made.response)
        self._prepared.record(chunk, chunk.text, calls, response)

    def encoded(self, part: Event) -> bytes:
        return event(part, part["type"])

    def whole(self, parts: list[Event]) -> dict[str, Any]:
        return self._made.response

    def failed(self, error: RequestError | EngineDiedError) -> bytes:
        if not (self._streams and self._has_begun):
            raise error
        return b"".join(map(self.encoded, self._made.failed(as_request_error(error))))


Event = dict[str, Any]

_TEXT: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_REASONING: dict[str, Any] = {"type": "reasoning_text", "text": ""}
_SUMMARY: dict[str, Any] = {"type": "summary_text", "text": ""}


class _CallForm(NamedTuple):
    item: str
    """Type of the output item."""
    id_prefix: str
    text: str
    """Its field that the deltas add to."""
    events: str


_CALLS = {
    "function": _CallForm("function_call", "fc", "arguments", "response.function_call_arguments"),
    "custom": _CallForm("custom_tool_call", "ctc", "input", "response.custom_tool_call_input"),
}
"""The form of a call, by the kind of tool."""


class ResponseEvents:
    """The events of one response.

    An event holds items that later events change, so it has to be encoded before the next one is
    taken. At most one output item is open at a time: ``reasoning``, ``message``, ``function_call``
    or ``custom_tool_call``, in the order in which the model writes them.

    Attributes:
        response: the response so far; complete after the last chunk.
    """

    def __init__(
        self, fields: ResponsesRequest, response_id: str, model: str, sampling: SamplingParams
    ) -> None:
        self.response = _new_response(fields, response_id, model, sampling)
        reasoning = fields.reasoning
        self._summarizes = bool(reasoning and (reasoning.summary or reasoning.generate_summary))
        self._seals = ENCRYPTED_REASONING in (fields.include or ())
        self._returns_times = bool(fields.return_times)
        self._number = 0
        self._item: dict[str, Any] | None = None
        """The open item."""
        self._space = ""
        """White space at the end of the text so far, which is dropped if a call follows it."""

    def from_chunk(
        self, chunk: AnswerChunk, calls: list[dict[str, Any]], logprobs: list[orjson.Fragment]
    ) -> Iterator[Event]:
        """The events that a chunk adds.

        Args:
            calls: the chunk's calls of tools as a chat would stream them.
            logprobs: JSON of each of its tokens, if the request asks for it.
        """
        if self._number == 0:
            yield self._event("response.created", response=self.response)
            yield self._event("response.in_progress", response=self.response)
        if chunk.reasoning:
            yield from self._reason(chunk.reasoning)
        text = self._space + chunk.text
        written = text.rstrip()
        self._space = text[len(written) :]
        if written:
            yield from self._write(written, logprobs)
        for call in calls:
            yield from self._call(call)
        if chunk.finish_reason is not None:
            if self._item is not None and self._item["type"] == "message" and self._space:
                yield from self._write(self._space, [])
            yield from self._finish(chunk.report)

    def failed(self, error: RequestError) -> Iterator[Event]:
        """The events that end a response that has begun and can't go on."""
        self.response |= {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        yield self._event("response.failed", response=self.response)

    # ------------------------------------------------------------ items

    def _reason(self, text: str) -> Iterator[Event]:
        if self._item is None or self._item["type"] != "reasoning":
            item: dict[str, Any] = {"id": new_id("rs"), "type": "reasoning", "summary": []}
            item |= {} if self._summarizes else {"content": []}
            item |= {"encrypted_content": None} if self._seals else {}
            yield from self._open(item)
            if self._summarizes:
                item["summary"].append(dict(_SUMMARY))
                yield self._item_event(
                    "response.reasoning_summary_part.added", summary_index=0, part=dict(_SUMMARY)
                )
            else:
                item["content"].append(dict(_REASONING))
                yield self._item_event(
                    "response.content_part.added", content_index=0, part=dict(_REASONING)
                )
        self._part["text"] += text
        if self._summarizes:
            yield self._item_event(
                "response.reasoning_summary_text.delta", summary_index=0, delta=text
            )
        else:
            yield self._item_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _write(self, text: str, logprobs: list[orjson.Fragment]) -> Iterator[Event]:
        if self._item is None or self._item["type"] != "message":
            item: dict[str, Any] = {
                "id": new_id("msg"),
                "type": "message",
                "role": "assistant",
                "content": [],
            }
            yield from self._open(item)
            item["content"].append(_TEXT | {"annotations": [], "logprobs": []})
            yield self._item_event("response.content_part.added", content_index=0, part=dict(_TEXT))
        self._part["text"] += text
        self._part["logprobs"] += logprobs
        yield self._item_event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=logprobs
        )

    def _call(self, call: dict[str, Any]) -> Iterator[Event]:
        kind = "custom" if "custom" in call else "function"
        called, form = call[kind], _CALLS[kind]
        if "id" in call:
            self._space = ""
            yield from self._close()
            item = {
                "id": new_id(form.id_prefix),
                "type": form.item,
                "call_id": call["id"],
                "name": called["name"],
                form.text: "",
            }
            yield from self._open(item)
        assert self._item is not None
        if delta := called[form.text]:
            self._item[form.text] += delta
            yield self._item_event(f"{form.events}.delta", delta=delta)

    @property
    def _part(self) -> dict[str, Any]:
        """The content part of the open item."""
        assert self._item is not None
        part: dict[str, Any] = (
            self._item["summary"] if self._item.get("summary") else self._item["content"]
        )[0]
        return part

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        item["status"] = "in_progress"
        self._item = item
        self.response["output"].append(item)
        yield self._event("response.output_item.added", output_index=self._output_index, item=item)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item."""
        if self._item is None:
            return
        if self._item["type"] == "function_call":
            yield self._item_event(
                "response.function_call_arguments.done",
                name=self._item["name"],
                arguments=self._item["arguments"],
            )
        elif self._item["type"] == "custom_tool_call":
            yield self._item_event(
                "response.custom_tool_call_input.done", input=self._item["input"]
            )
        else:
            yield from self._close_part(self._item["type"])
        self._item["status"] = status
        yield self._event(
            "response.output_item.done", output_index=self._output_index, item=self._item
        )
        self._item = None

    def _close_part(self, kind: str) -> Iterator[Event]:
        part = self._part
        text = part["text"]
        if kind == "message":
            logprobs = part["logprobs"]
            yield self._item_event(
                "response.output_text.done", content_index=0, text=text, logprobs=logprobs
            )
            yield self._item_event("response.content_part.done", content_index=0, part=part)
            return
        if self._seals and self._item is not None:
            self._item["encrypted_content"] = sealed(text)
        if self._summarizes:
            yield self._item_event(
                "response.reasoning_summary_text.done", summary_index=0, text=text
            )
            yield self._item_event(
                "response.reasoning_summary_part.done", summary_index=0, part=part
            )
        else:
            yield self._item_event("response.reasoning_text.done", content_index=0, text=text)
            yield self._item_event("response.content_part.done", content_index=0, part=part)

    def _finish(self, report: AnswerReport) -> Iterator[Event]:
        cut = report.finish_reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        self.response |= {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": _usage(report),
            **structured_extras(report),
            **explanation_extras(report),
            **(times_extras(report) if self._returns_times else {}),
        }
        if report.finish_reason == "abort":
            aborted = RequestError("The request was aborted.", code="request_aborted")
            yield from self.failed(aborted)
            return
        name = "response.incomplete" if cut else "response.completed"
        yield self._event(name, response=self.response)

    @property
    def _output_index(self) -> int:
        return len(self.response["output"]) - 1

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """An event about the open item."""
        assert self._item is not None
        ids = {"item_id": self._item["id"], "output_index": self._output_index}
        return self._event(kind, **ids, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
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


def _new_response(
    fields: ResponsesRequest, response_id: str, model: str, sampling: SamplingParams
) -> dict[str, Any]:
    reasoning = fields.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "prompt_cache_key": fields.prompt_cache_key,
        "safety_identifier": fields.safety_identifier,
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
        "user": fields.user,
    }
