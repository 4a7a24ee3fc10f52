"""``/generate``: the native endpoint, in the form that SGLang's users know."""

import dataclasses
import itertools
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.body import read_json, to_struct
from radixrt.api.completions import token_prompt
from radixrt.api.events import DONE, EventStream, event, json_response, while_connected
from radixrt.api.formats import json_logprob
from radixrt.api.protocol import ConstraintFields, refuse_unsupported
from radixrt.api.sampling import deadline, logit_bias, priority, stop_strings
from radixrt.api.state import ServerState, new_id, request_id
from radixrt.api.structured import asked_constraint, structured_extras
from radixrt.cache_hint import CacheHint, hints_of
from radixrt.constrained.requests import check_sampling
from radixrt.constrained.spec import Spec
from radixrt.errors import RequestError
from radixrt.messages.answers import AnswerChunk, TokenLogprob
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import GenerateRequest, Prompt, TextPrompt
from radixrt.sampling_params import SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""


class NativeSampling(msgspec.Struct, kw_only=True):
    n: int | None = None
    max_tokens: int | None = None
    """The same as max_new_tokens, which wins."""
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
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None


_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
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
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    """From which prompt token on log-probabilities are returned; -1: none of the prompt."""
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: str | None = None
    cache: CacheHint | None = None
    priority: int | None = None
    timeout: float | None = None


def native_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body = await read_json(request)
        refuse_unsupported(body)
        _refuse_constraints(body)
        call = _Call.plan(to_struct(body, NativeRequest), state)
        request.state.request_id = call.id
        if call.stream:
            return EventStream(_stream(call, state))
        return json_response(await while_connected(request, _whole(call, state)))

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        body = await read_json(request)
        if body.get("abort_all") is True:
            state.abort_all()
            return json_response({"success": True})
        rid = body.get("rid")
        if not isinstance(rid, str):
            raise RequestError("rid must be the string that names a request.", param="rid")
        state.abort(rid)
        return json_response({"success": True})

    return router


@dataclasses.dataclass(frozen=True)
class _Report:
    """What the response to one prompt holds beside its text."""

    logprobs: int | None
    """Alternatives of each token; None: no log-probabilities."""
    prompt_start: int
    """From which prompt token on; -1: none."""
    with_text: bool
    prompt_only: bool
    """max_new_tokens was 0: one token is generated and thrown away."""

    def of_tokens(self, whole: "_SoFar") -> dict[str, Any]:
        """The log-probabilities, as ``meta_info`` has them."""
        if self.logprobs is None:
            return {}
        fields = self._lists("output", [] if self.prompt_only else whole.logprobs)
        if self.prompt_start >= 0:
            fields |= self._lists("input", whole.prompt_logprobs)
        return fields

    def _lists(self, which: str, tokens: list[TokenLogprob]) -> dict[str, Any]:
        return {
            f"{which}_token_logprobs": [self._entry(token) for token in tokens],
            f"{which}_top_logprobs": [[self._entry(t) for t in token.top] for token in tokens],
        }

    def _entry(self, token: TokenLogprob) -> list[Any]:
        """[log-probability, token id, text or null]."""
        return [
            json_logprob(token.logprob),
            token.token_id,
            token.token if self.with_text else None,
        ]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One HTTP request, ready to run."""

    id: str
    reports: list[_Report]
    """One a prompt."""
    requests: list[GenerateRequest]
    first_index: list[int]
    """Of each prompt: the place of its first answer among those of all."""
    stream: bool
    is_list: bool
    """Whether the response is a list: for a batch, or for n > 1."""

    @staticmethod
    def plan(fields: NativeRequest, state: ServerState) -> "_Call":
        prompts, is_batch = _prompts(fields, state.info.vocab_size)
        count = len(prompts)
        reports, sampling, constraints = [], [], []
        for given, wants, top, start in zip(
            _given_sampling(fields.sampling_params, count),
            _one_each("return_logprob", fields.return_logprob, count),
            _one_each("top_logprobs_num", fields.top_logprobs_num, count),
            _one_each("logprob_start_len", fields.logprob_start_len, count),
            strict=True,
        ):
            report = _Report(
                logprobs=(top or 0) if wants else None,
                prompt_start=-1 if start is None else start,
                with_text=bool(fields.return_text_in_logprobs),
                prompt_only=_max_new_tokens(given) == 0,
            )
            reports.append(report)
            sampling.append(_sampling(given, report, state))
            constraints.append(_constraint(given, report, sampling[-1], state))
        state.check_answer_count(count, max(params.n for params in sampling))
        hints = hints_of(fields.cache)
        call_id, rids = _request_ids(fields.rid, count)
        requests = [
            GenerateRequest(
                request_id=rid,
                owner=call_id,
                prompt=prompt,
                sampling=params,
                stream=bool(fields.stream),
                cache_salt=fields.cache_salt or "",
                priority=priority(fields.priority, state.config),
                cache_hints=hints,
                deadline=deadline(fields.timeout),
                structured=structured,
            )
            for rid, prompt, params, structured in zip(
                rids, prompts, sampling, constraints, strict=True
            )
        ]
        is_list = is_batch or sampling[0].n > 1
        first_index = list(itertools.accumulate((p.n for p in sampling[:-1]), initial=0))
        return _Call(call_id, reports, requests, first_index, bool(fields.stream), is_list)

    def result(self, request_index: int, chunk: AnswerChunk, whole: "_SoFar") -> dict[str, Any]:
        """One answer as it is so far."""
        request, report = self.requests[request_index], self.reports[request_index]
        num_output = 0 if report.prompt_only else chunk.num_output_tokens
        meta: dict[str, Any] = {
            "id": request.request_id,
            "finish_reason": _finish_reason(chunk, report.prompt_only),
            "prompt_tokens": whole.prompt_tokens,
            "completion_tokens": num_output,
            "cached_tokens": chunk.cached_tokens,
            "cache_write_tokens": chunk.cache_write_tokens,
        }
        meta |= structured_extras(chunk)
        if chunk.retries:
            meta["structured_output_retries"] = chunk.retries
        if chunk.times is not None:
            meta |= {
                "queue_time": chunk.times.queued_s,
                "prefill_time": chunk.times.prefill_s,
                "e2e_latency": time.monotonic() - whole.started_at,
            }
        result: dict[str, Any] = {
            "text": "" if report.prompt_only else whole.text,
            "output_ids": [] if report.prompt_only else whole.token_ids,
            "meta_info": meta | report.of_tokens(whole),
        }
        if self.is_list:
            result["index"] = self.first_index[request_index] + chunk.index
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
    with _native_names():
        async with aclosing(state.generate(call.requests, "sampling_params")) as chunks:
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


def _one_each(field: str, value: Any, count: int) -> list[Any]:
    """A value a prompt, where one may have come for all of them.

    Raises:
        RequestError: it is a list of another length.
    """
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestError(
            f"{field} has {len(value)} entries for {count} prompts; give one, or one a prompt.",
            param=field,
        )
    return value


def _given_sampling(
    params: dict[str, Any] | list[dict[str, Any]] | None, count: int
) -> list[NativeSampling]:
    """Raises:
    RequestError: a value is of the wrong type, or can't be honoured; names the field.
    """

    def check(one: dict[str, Any]) -> NativeSampling:
        with _native_names():
            refuse_unsupported(one)
            _refuse_constraints(one, "sampling_params.", _CONSTRAINTS)
            return to_struct(one, NativeSampling)

    if isinstance(params, list):
        return [check(one) for one in _one_each("sampling_params", params, count)]
    return [check(params or {})] * count


def _max_new_tokens(given: NativeSampling) -> int | None:
    return given.max_tokens if given.max_new_tokens is None else given.max_new_tokens


def _sampling(given: NativeSampling, report: _Report, state: ServerState) -> SamplingParams:
    """Raises:
    RequestError: a value is out of its range; names the field.
    """
    settings: dict[str, Any] = dict(state.default_sampling)
    for name in NativeSampling.__struct_fields__:
        if name not in _CONSTRAINTS and (value := getattr(given, name)) is not None:
            settings[_RENAMED.get(name, name)] = value
    if report.prompt_only:
        settings["max_tokens"] = 1
    elif _max_new_tokens(given) is None:
        settings["max_tokens"] = max(DEFAULT_MAX_NEW_TOKENS, settings.get("min_tokens", 0))
    settings["logprobs"] = report.logprobs
    if report.logprobs is not None and report.prompt_start >= 0:
        settings["prompt_logprobs"] = report.logprobs
        settings["prompt_logprobs_start"] = report.prompt_start
    with _native_names():
        settings["stop"] = stop_strings(given.stop)
        settings["stop_token_ids"] = tuple(given.stop_token_ids or ())
        settings["logit_bias"] = logit_bias(given.logit_bias)
        return SamplingParams(**settings).validate(state.info.vocab_size)


def _constraint(
    given: NativeSampling, report: _Report, sampling: SamplingParams, state: ServerState
) -> Spec | None:
    """Raises:
    RequestError: there are several, or one is not well formed, or there will be no answer.
    """
    structured = asked_constraint(given, state.config, "sampling_params.")
    with _native_names():
        check_sampling(structured, sampling)
    if structured is not None and report.prompt_only:
        raise RequestError(
            "max_new_tokens is 0, so there is no answer to hold to a constraint; leave one of them out.",
            param="sampling_params.max_new_tokens",
        )
    return structured


def _refuse_constraints(
    body: dict[str, Any], prefix: str = "", allowed: tuple[str, ...] = ()
) -> None:
    """Raises:
    RequestError: a constraint stands where this endpoint has none.
    """
    for name in ConstraintFields.__struct_fields__:
        if name not in allowed and body.get(name) is not None:
            raise RequestError(
                f"{prefix}{name} is no field of /generate; its constraints are {', '.join(_CONSTRAINTS)} in "
                "sampling_params.",
                param=prefix + name,
            )


_NATIVE_NAMES = (
    {name: f"sampling_params.{name}" for name in NativeSampling.__struct_fields__}
    | {ours: f"sampling_params.{native}" for native, ours in _RENAMED.items()}
    | {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"}
    | {"prompt_logprobs_start": "logprob_start_len"}
)
"""What this endpoint's clients call each sampling setting."""


@contextmanager
def _native_names() -> Iterator[None]:
    """Let errors about sampling settings name the fields that the client sent."""
    try:
        yield
    except RequestError as error:
        ours = re.match(r"\w*", error.param or "").group()  # type: ignore[union-attr]
        native = _NATIVE_NAMES.get(ours)
        if native is None or error.param is None:
            raise
        raise RequestError(
            re.sub(rf"\b{ours}\b", native, error.message),
            status=error.status,
            param=native + error.param.removeprefix(ours),
            code=error.code,
            retry_after_s=error.retry_after_s,
        ) from error


def _request_ids(rid: str | list[str] | None, count: int) -> tuple[str, list[str]]:
    """The name of the whole request, and one for each prompt."""
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count:
            raise RequestError(
                f"rid must hold one different name for each of the {count} prompts.", param="rid"
            )
        names = [request_id("gen", name) for name in rid]
        return (names[0] if count == 1 else new_id("gen")), names
    name = request_id("gen", rid)
    return name, [name] if count == 1 else [f"{name}_{number}" for number in range(count)]


def _finish_reason(chunk: AnswerChunk, prompt_only: bool) -> dict[str, Any] | None:
    if chunk.finish_reason is None:
        return None
    if prompt_only and chunk.finish_reason != "abort":
        return {"type": "length", "length": 0}
    reason: dict[str, Any] = {"type": chunk.finish_reason}
    if chunk.finish_reason == "length":
        reason["length"] = chunk.num_output_tokens
    if chunk.finish_reason == "stop":
        matched = chunk.stop_reason
        reason["matched"] = unpack_ids(chunk.token_ids).tolist()[-1] if matched is None else matched
    return reason
