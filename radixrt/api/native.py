"""``/generate``: the native endpoint, in the form that SGLang's users know."""

import dataclasses
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.completions import token_prompt
from radixrt.api.events import DONE, EventStream, event, json_response, while_connected
from radixrt.api.formats import json_logprob
from radixrt.api.protocol import refuse_unsupported
from radixrt.api.sampling import deadline, logit_bias, stop_strings
from radixrt.api.state import ServerState, new_id
from radixrt.errors import RequestError
from radixrt.messages import (
    AnswerChunk,
    GenerateRequest,
    Prompt,
    TextPrompt,
    TokenLogprob,
    unpack_ids,
)
from radixrt.sampling_params import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""


class NativeSampling(msgspec.Struct, kw_only=True):
    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}


class NativeRequest(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    """From which prompt token on log-probabilities are returned; -1: none of the prompt."""
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: str | None = None
    timeout: float | None = None


def native_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body = await read_json(request)
        refuse_unsupported(body)
        call = _Call.plan(to_struct(body, NativeRequest), state)
        if call.fields.stream:
            return EventStream(_stream(call, state))
        return json_response(await while_connected(request, _whole(call, state)))

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await read_json(request)
        if body.get("abort_all") is True:
            state.client.abort_all()
            return json_response({"success": True})
        rid = body.get("rid")
        if not isinstance(rid, str):
            raise RequestError("rid must be the string that names a request.", param="rid")
        state.client.abort(rid)
        return json_response({"success": True})

    return router


@dataclasses.dataclass(frozen=True)
class _Call:
    """One HTTP request, ready to run."""

    fields: NativeRequest
    requests: list[GenerateRequest]
    is_list: bool
    """Whether the response is a list: for a batch, or for n > 1."""

    @staticmethod
    def plan(fields: NativeRequest, state: ServerState) -> "_Call":
        prompts, is_batch = _prompts(fields, state.info.vocab_size)
        settings = fields.sampling_params or {}
        if isinstance(settings, dict):
            settings = [settings] * len(prompts)
        if len(settings) != len(prompts):
            raise RequestError(
                f"sampling_params has {len(settings)} entries for {len(prompts)} prompts; give one, or one a prompt.",
                param="sampling_params",
            )
        sampling = [_sampling(params, fields, state) for params in settings]
        state.check_answer_count(len(prompts), max(params.n for params in sampling))
        requests = [
            GenerateRequest(
                request_id=rid,
                prompt=prompt,
                sampling=params,
                stream=bool(fields.stream),
                cache_salt=fields.cache_salt or "",
                deadline=deadline(fields.timeout),
            )
            for rid, prompt, params in zip(
                _request_ids(fields.rid, len(prompts)), prompts, sampling, strict=True
            )
        ]
        return _Call(fields, requests, is_batch or sampling[0].n > 1)

    def result(self, request_index: int, chunk: AnswerChunk, whole: "_SoFar") -> dict[str, Any]:
        """One answer as it is so far."""
        request = self.requests[request_index]
        meta: dict[str, Any] = {
            "id": request.request_id,
            "finish_reason": _finish_reason(chunk),
            "prompt_tokens": whole.prompt_tokens,
            "completion_tokens": chunk.num_output_tokens,
            "cached_tokens": chunk.cached_tokens,
        }
        if chunk.times is not None:
            meta |= {
                "queue_time": chunk.times.queued_s,
                "prefill_time": chunk.times.prefill_s,
                "e2e_latency": time.monotonic() - whole.started_at,
            }
        if self.fields.return_logprob:
            texts = bool(self.fields.return_text_in_logprobs)
            meta["output_token_logprobs"] = [_pair(t, texts) for t in whole.logprobs]
            meta["output_top_logprobs"] = [[_pair(o, texts) for o in t.top] for t in whole.logprobs]
            start = self.fields.logprob_start_len
            if start is not None and start >= 0:
                prompt = whole.prompt_logprobs[start:]
                meta["input_token_logprobs"] = [_pair(t, texts) for t in prompt]
                meta["input_top_logprobs"] = [[_pair(o, texts) for o in t.top] for t in prompt]
        result: dict[str, Any] = {
            "text": whole.text,
            "output_ids": whole.token_ids,
            "meta_info": meta,
        }
        if self.is_list:
            result["index"] = request_index * request.sampling.n + chunk.index
        return result


@dataclasses.dataclass
class _SoFar:
    """An answer as far as it has come: this endpoint's events repeat the whole of it."""

    started_at: float
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0

    def add(self, chunk: AnswerChunk) -> None:
        self.text += chunk.text
        self.token_ids += unpack_ids(chunk.token_ids).tolist()
        self.logprobs += chunk.logprobs or []
        if chunk.prompt is not None:
            self.prompt_tokens = chunk.prompt.num_tokens
            self.prompt_logprobs = chunk.prompt.logprobs or []


async def _results(call: _Call, state: ServerState) -> AsyncGenerator[dict[str, Any], None]:
    answers: dict[tuple[int, int], _SoFar] = {}
    started_at = time.monotonic()
    async with aclosing(state.generate(call.requests)) as chunks:
        async for request_index, chunk in chunks:
            whole = answers.setdefault((request_index, chunk.index), _SoFar(started_at))
            whole.add(chunk)
            yield call.result(request_index, chunk, whole)


async def _whole(call: _Call, state: ServerState) -> Any:
    results = []
    async with aclosing(_results(call, state)) as whole:
        async for result in whole:
            results.append(result)
    if not call.is_list:
        return results[0]
    results.sort(key=lambda result: result.pop("index"))
    return results


async def _stream(call: _Call, state: ServerState) -> AsyncGenerator[bytes, None]:
    async with aclosing(_results(call, state)) as results:
        async for result in results:
            yield event(result)
    yield DONE


def _prompts(fields: NativeRequest, vocab_size: int) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a batch."""
    if (fields.text is None) == (fields.input_ids is None):
        raise RequestError("Give either text or input_ids.", param="text")
    if isinstance(fields.text, str):
        return [TextPrompt(fields.text)], False
    if fields.text is not None:
        if not fields.text:
            raise RequestError("text is an empty list; give at least one prompt.", param="text")
        return [TextPrompt(text) for text in fields.text], True
    ids = fields.input_ids or []
    if ids and all(isinstance(item, list) for item in ids):
        return [token_prompt(item, vocab_size, "input_ids") for item in ids], True
    return [token_prompt(ids, vocab_size, "input_ids")], False


def _sampling(params: dict[str, Any], fields: NativeRequest, state: ServerState) -> SamplingParams:
    """Raises:
    RequestError: a value is of the wrong type or out of its range; names the field.
    """
    refuse_unsupported(params)
    given = to_struct(params, NativeSampling)
    settings: dict[str, Any] = {"max_tokens": DEFAULT_MAX_NEW_TOKENS} | state.default_sampling
    for name in NativeSampling.__struct_fields__:
        if (value := getattr(given, name)) is not None:
            settings[_RENAMED.get(name, name)] = value
    settings["max_tokens"] = max(settings["max_tokens"], settings.get("min_tokens", 0))
    settings["stop"] = stop_strings(given.stop)
    settings["stop_token_ids"] = tuple(given.stop_token_ids or ())
    settings["logit_bias"] = logit_bias(given.logit_bias)
    if fields.return_logprob:
        settings["logprobs"] = fields.top_logprobs_num or 0
        if fields.logprob_start_len is not None and fields.logprob_start_len >= 0:
            settings["prompt_logprobs"] = fields.top_logprobs_num or 0
    return SamplingParams(**settings).validate(state.info.vocab_size)


def _request_ids(rid: str | list[str] | None, count: int) -> list[str]:
    if rid is None:
        return [new_id("gen") for _ in range(count)]
    rids = [rid] if isinstance(rid, str) else rid
    if isinstance(rid, str) and count > 1:
        rids = [f"{rid}_{number}" for number in range(count)]
    if len(rids) != count or len(set(rids)) != count:
        raise RequestError(
            f"rid must hold one different name for each of the {count} prompts.", param="rid"
        )
    return rids


def _finish_reason(chunk: AnswerChunk) -> dict[str, Any] | None:
    if chunk.finish_reason is None:
        return None
    reason: dict[str, Any] = {"type": chunk.finish_reason}
    if chunk.finish_reason == "length":
        reason["length"] = chunk.num_output_tokens
    if chunk.finish_reason == "stop":
        matched = chunk.stop_reason
        reason["matched"] = unpack_ids(chunk.token_ids).tolist()[-1] if matched is None else matched
    return reason


def _pair(token: TokenLogprob, with_text: bool) -> list[Any]:
    """[log-probability, token id, text or null]."""
    return [json_logprob(token.logprob), token.token_id, token.token if with_text else None]
