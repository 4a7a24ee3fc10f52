"""``/generate``: the native endpoint, in the form that SGLang's users know."""

import itertools
import time
from collections import defaultdict
from typing import Any

from fastapi import APIRouter, Request, Response

from radixrt.api.answering import Formatter, respond
from radixrt.api.http.body import read_json
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import DONE, json_response
from radixrt.api.http.keys import caller_of
from radixrt.api.logprobs import JsonList, in_slices, json_logprob
from radixrt.api.native.generate_request import (
    NativeRequest,
    PreparedGenerate,
    native_names,
    refuse,
)
from radixrt.api.responses import explanation_extras, structured_extras
from radixrt.api.state import ServerState
from radixrt.base.errors import EngineDiedError, RequestError
from radixrt.messages.answers import AnswerChunk, TokenLogprob, TokenLogprobs
from radixrt.messages.ids import unpack_ids


def native_routes(state: ServerState) -> APIRouter:
    router = Endpoints(state)

    @router.takes("/generate", NativeRequest, refuse)
    async def generate(request: Request, fields: NativeRequest) -> Response:
        prepared = PreparedGenerate.read(fields, state, caller_of(request))
        formatter = _Results(prepared, bool(fields.return_text_in_logprobs))
        return await respond(formatter, prepared, request, state)

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await read_json(request, state.json_bounds)
        caller = caller_of(request)
        if body.get("abort_all") is True:
            caller.check_admin("abort_all")
            state.abort_all()
            return json_response({"success": True})
        rid = body.get("rid")
        if not isinstance(rid, str):
            raise RequestError("rid must be the string that names a request.", param="rid")
        state.abort(rid, caller)
        return json_response({"success": True})

    return router


class _Results(Formatter):
    """Each answer so far, after each chunk: the events of this endpoint repeat the whole answer."""

    last = DONE

    def __init__(self, prepared: PreparedGenerate, with_text: bool) -> None:
        """
        Args:
            with_text: of each token beside its log-probability.
        """
        super().__init__(prepared)
        self._is_list = prepared.is_list
        counts = [request.sampling.n for request in prepared.requests]
        self._first_index = list(itertools.accumulate(counts[:-1], initial=0))
        started_at = time.monotonic()
        self._answers = [
            _NativeAnswer(prepared, number, with_text, started_at)
            for number, count in enumerate(counts)
            for _ in range(count)
        ]

    async def parts(self, prompt_index: int, chunk: AnswerChunk) -> list[dict[str, Any]]:
        index = self._first_index[prompt_index] + chunk.index
        result = await self._answers[index].after(chunk)
        return [result | {"index": index} if self._is_list else result]

    def whole(self, parts: list[dict[str, Any]]) -> Any:
        if not self._is_list:
            return parts[0]
        parts.sort(key=lambda result: result.pop("index"))
        return parts

    def failed(self, error: RequestError | EngineDiedError) -> bytes:
        with native_names():
            raise error


class _NativeAnswer:
    """One answer, put together from chunks."""

    def __init__(
        self, prepared: PreparedGenerate, number: int, with_text: bool, started_at: float
    ) -> None:
        """
        Args:
            number: of the prompt.
        """
        self._request = prepared.requests[number]
        self._is_hidden = prepared.prompt_only[number]
        self._with_text = with_text
        self._started_at = started_at
        self._text = ""
        self._token_ids: list[int] = []
        self._lists: dict[str, JsonList] = defaultdict(JsonList)
        """The lists of log-probabilities so far, by their names."""

    async def after(self, chunk: AnswerChunk) -> dict[str, Any]:
        """The result with this chunk."""
        if not self._is_hidden:
            self._text += chunk.text
            self._token_ids += unpack_ids(chunk.token_ids).tolist()
            await self._add("output", chunk.logprobs)
        if chunk.prompt is not None:
            await self._add("input", chunk.prompt.logprobs)
        meta = self._meta(chunk) | self._token_logprobs()
        return {"text": self._text, "output_ids": self._token_ids, "meta_info": meta}

    def _meta(self, chunk: AnswerChunk) -> dict[str, Any]:
        report = chunk.report
        meta: dict[str, Any] = {
            "id": self._request.request_id,
            "finish_reason": _finish_reason(chunk, self._is_hidden),
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": 0 if self._is_hidden else report.output_tokens,
            "cached_tokens": report.cached_tokens,
            "cache_write_tokens": report.cache_write_tokens,
        }
        meta |= structured_extras(report) | explanation_extras(report)
        if report.retries:
            meta["structured_output_retries"] = report.retries
        if report.finish_reason is not None:
            meta["queue_time"] = report.queued_s
            meta["prefill_time"] = report.prefill_s
            meta["e2e_latency"] = time.monotonic() - self._started_at
        return meta

    async def _add(self, which: str, tokens: TokenLogprobs | None) -> None:
        """Write the log-probabilities of new tokens, of which each event repeats the text."""
        if tokens is None:
            return
        async for rows in in_slices(tokens):
            self._lists[f"{which}_token_logprobs"].extend([self._entry(row) for row in rows])
            self._lists[f"{which}_top_logprobs"].extend(
                [[self._entry(other) for other in row.top] for row in rows]
            )

    def _token_logprobs(self) -> dict[str, Any]:
        """The log-probabilities, as ``meta_info`` has them."""
        sampling = self._request.sampling
        asked = {"output": sampling.logprobs, "input": sampling.prompt_logprobs}
        names = [
            f"{which}_{kind}_logprobs"
            for which, number in asked.items()
            if number is not None
            for kind in ("token", "top")
        ]
        return {name: self._lists[name].json() for name in names}

    def _entry(self, token: TokenLogprob) -> list[Any]:
        """[log-probability, token id, text or null]."""
        text = token.token if self._with_text else None
        return [json_logprob(token.logprob), token.token_id, text]


def _finish_reason(chunk: AnswerChunk, prompt_only: bool) -> dict[str, Any] | None:
    if chunk.finish_reason is None:
        return None
    if prompt_only and chunk.finish_reason != "abort":
        return {"type": "length", "length": 0}
    reason: dict[str, Any] = {"type": chunk.finish_reason}
    if chunk.finish_reason == "length":
        reason["length"] = chunk.report.output_tokens
    if chunk.finish_reason == "stop":
        matched = chunk.report.stop_reason
        reason["matched"] = unpack_ids(chunk.token_ids).tolist()[-1] if matched is None else matched
    return reason
