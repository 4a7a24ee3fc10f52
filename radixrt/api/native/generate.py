"""``/generate``: the native endpoint, in the form that SGLang's users know."""

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response

from radixrt.api.answering import Formatter, Prepared, respond
from radixrt.api.conversations.continuation import Continuation
from radixrt.api.http.endpoints import Endpoints, read_json, to_struct
from radixrt.api.http.events import DONE, json_response
from radixrt.api.http.middleware import new_id
from radixrt.api.logprobs import JsonList, KeptMass, in_slices, json_logprob
from radixrt.api.requests.constraint import asked_constraint
from radixrt.api.requests.options import (
    check_answer_count,
    request_id,
    request_options,
    sampling_of,
)
from radixrt.api.requests.prompts import token_prompt
from radixrt.api.requests.protocol import (
    ConstraintFields,
    QueueFields,
    RequestBody,
    refuse_unsupported,
)
from radixrt.api.responses import report_extras
from radixrt.api.state import Context, Here, ServerState
from radixrt.base.errors import EngineDiedError, RequestError, wrong
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import Constraint
from radixrt.constrained.requests import check_sampling
from radixrt.messages.answers import AnswerChunk, TokenLogprob, TokenLogprobs
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import GenerateRequest, Prompt, Tenant, TextPrompt

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
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    kept_mass: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    property_order: str | None = None


_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")
_RENAMED = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}


class NativeRequest(QueueFields, kw_only=True):
    model: str | None = None
    """The base model or an adapter; None: the base model."""
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    """The first prompt token whose log-probability is returned; -1: none of the prompt."""
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    continue_from: str | None = None
    """The id of a kept text, or of a prompt that arrives in pieces; ``text`` is what follows."""
    continue_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class PreparedGenerate(Prepared):
    """One HTTP request, ready to run."""

    prompt_only: list[bool]
    """Whether max_new_tokens of each prompt was 0, so that one token is generated and thrown
    away."""
    is_list: bool
    """The response is a list: for a batch, or for n > 1."""

    @staticmethod
    def read(fields: NativeRequest, context: Context) -> "PreparedGenerate":
        """Raises RequestError if a field is out of its range, or does not fit the others; names it."""
        state = context.state
        prompts, is_batch = _prompts(fields, Continuation.find(fields, "text", context), state)
        count = len(prompts)
        call_id, names = _request_ids(fields.rid, count)
        given = _given_sampling(fields.sampling_params, count)
        settings = zip(
            _one_each("return_logprob", fields.return_logprob, count),
            _one_each("top_logprobs_num", fields.top_logprobs_num, count),
            _one_each("logprob_start_len", fields.logprob_start_len, count),
            strict=True,
        )
        sampling = [
            _sampling(
                one,
                (top or 0) if wants else None,
                -1 if start is None else start,
                state,
                context.tenant,
            )
            for one, (wants, top, start) in zip(given, settings, strict=True)
        ]
        structured = [_constraint(*both, state) for both in zip(given, sampling, strict=True)]
        check_answer_count(state.config, count, max(params.n for params in sampling))
        options = request_options(fields, context)
        requests = [
            GenerateRequest(
                request_id=name,
                group_id=call_id,
                prompt=prompt,
                options=msgspec.structs.replace(options, sampling=params),
                stream=bool(fields.stream),
                constraint=constraint,
            )
            for name, prompt, params, constraint in zip(
                names, prompts, sampling, structured, strict=True
            )
        ]
        return PreparedGenerate(
            id=call_id,
            requests=requests,
            constraint_field="sampling_params",
            prompt_only=[_max_new_tokens(one) == 0 for one in given],
            is_list=is_batch or sampling[0].n > 1,
        )


def _prompts(
    fields: NativeRequest, continuation: Continuation, state: ServerState
) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a batch."""
    if (fields.text is None) == (fields.input_ids is None):
        raise RequestError("Give either text or input_ids.", param="text")
    if isinstance(fields.text, str):
        return [TextPrompt(continuation.text + fields.text)], False
    if continuation.source is not None:
        raise RequestError("continue_from is for a single prompt, as text.", param="text")
    if fields.text is not None:
        if not fields.text:
            raise wrong("text", "is an empty list; give at least one prompt")
        check_answer_count(state.config, len(fields.text))
        return [TextPrompt(text) for text in fields.text], True
    ids, vocab_size = fields.input_ids or [], state.info.vocab_size
    if ids and isinstance(ids[0], list) and all(isinstance(item, list) for item in ids):
        check_answer_count(state.config, len(ids))
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
        raise wrong(
            field, f"has {len(value)} entries for {count} prompts; give one, or one a prompt"
        )
    return value


def _given_sampling(
    params: dict[str, Any] | list[dict[str, Any]] | None, count: int
) -> list[NativeSampling]:
    """Raises RequestError if a value is of the wrong type, or can't be honoured; names the field."""

    def check(one: dict[str, Any]) -> NativeSampling:
        with native_names():
            refuse(one, "sampling_params.", (*_CONSTRAINTS, "property_order"))
            return to_struct(one, NativeSampling)

    if isinstance(params, list):
        return [check(one) for one in _one_each("sampling_params", params, count)]
    return [check(params or {})] * count


def _max_new_tokens(given: NativeSampling) -> int | None:
    return given.max_tokens if given.max_new_tokens is None else given.max_new_tokens


def _sampling(
    given: NativeSampling,
    logprobs: int | None,
    prompt_start: int,
    state: ServerState,
    tenant: Tenant,
) -> SamplingParams:
    """
    Args:
        logprobs: alternatives of each token; None: no log-probabilities.
        prompt_start: from which prompt token on there are log-probabilities; -1: of none.

    Raises:
        RequestError: a value is out of its range; names the field.
    """
    settings: dict[str, Any] = {}
    for name in NativeSampling.__struct_fields__:
        if (
            name not in (*_CONSTRAINTS, "property_order")
            and (value := getattr(given, name)) is not None
        ):
            settings[_RENAMED.get(name, name)] = value
    if _max_new_tokens(given) is None:
        settings["max_tokens"] = max(
            tenant.at_most(DEFAULT_MAX_NEW_TOKENS), given.min_new_tokens or 0
        )
    elif _max_new_tokens(given) == 0:
        settings["max_tokens"] = 1
    settings["logprobs"] = logprobs
    if logprobs is not None and prompt_start >= 0:
        settings |= {"prompt_logprobs": logprobs, "prompt_logprobs_start": prompt_start}
    with native_names():
        return sampling_of(settings, state)


def _constraint(
    given: NativeSampling, sampling: SamplingParams, state: ServerState
) -> Constraint | None:
    """Raises RequestError if there are several, or one is not well formed, or there will be no
    answer."""
    structured = asked_constraint(given, state.config, "sampling_params.").constraint
    with native_names():
        check_sampling(structured, sampling)
    if structured is not None and _max_new_tokens(given) == 0:
        raise RequestError(
            "max_new_tokens is 0, so there is no answer to hold to a constraint; leave one of them out.",
            param="sampling_params.max_new_tokens",
        )
    return structured


def refuse(body: dict[str, Any], prefix: str = "", allowed: tuple[str, ...] = ()) -> None:
    """Raises RequestError if a constraint is in a field where this endpoint has none, or a field is
    not supported."""
    refuse_unsupported(body, also=("max_reasoning_tokens",))
    for name in set(ConstraintFields.__struct_fields__).difference(RequestBody.__struct_fields__):
        if name not in allowed and body.get(name) is not None:
            raise RequestError(
                f"Unknown field {prefix + name!r} of /generate; its constraints are {', '.join(_CONSTRAINTS)} in "
                "sampling_params.",
                param=prefix + name,
            )


_NATIVE_NAMES = (
    {name: f"sampling_params.{name}" for name in NativeSampling.__struct_fields__}
    | {ours: f"sampling_params.{native}" for native, ours in _RENAMED.items()}
    | {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num"}
    | {"prompt_logprobs_start": "logprob_start_len"}
)
"""The names of sampling settings in requests to this endpoint."""


@contextmanager
def native_names() -> Iterator[None]:
    """Let errors about sampling settings name the fields of the request."""
    try:
        yield
    except RequestError as error:
        ours = re.match(r"\w*", error.param or "").group()  # type: ignore[union-attr]
        native = _NATIVE_NAMES.get(ours)
        if native is None or error.param is None:
            raise
        error.message = re.sub(rf"\b{ours}\b", native, error.message)
        error.param = native + error.param.removeprefix(ours)
        raise


def _request_ids(rid: str | list[str] | None, count: int) -> tuple[str, list[str]]:
    """The name of the whole request, and one for each prompt."""
    if isinstance(rid, list):
        if len(rid) != count or len(set(rid)) != count:
            raise wrong("rid", f"must hold one different name for each of the {count} prompts")
        names = [request_id("gen", name) for name in rid]
        return (names[0] if count == 1 else new_id("gen")), names
    name = request_id("gen", rid)
    return name, [name] if count == 1 else [f"{name}_{number}" for number in range(count)]


routes = Endpoints()


@routes.takes("/generate", NativeRequest, refuse)
async def generate(fields: NativeRequest, context: Context) -> Response:
    prepared = PreparedGenerate.read(fields, context)
    return await respond(_Results(prepared, bool(fields.return_text_in_logprobs)), context)


@routes.post("/abort_request")
async def abort_request(context: Here) -> Response:
    body = await read_json(context.request, context.state.json_bounds)
    if body.get("abort_all") is True:
        context.caller.check_admin("abort_all")
        context.state.abort_all()
        return json_response({"success": True})
    rid = body.get("rid")
    if not isinstance(rid, str):
        raise wrong("rid", "must be the string that names a request")
    context.state.abort(rid, context.caller)
    return json_response({"success": True})


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
        self._kept_mass = KeptMass()
        self._lists: dict[str, JsonList] = defaultdict(JsonList)
        """The lists of log-probabilities so far, by their names."""

    async def after(self, chunk: AnswerChunk) -> dict[str, Any]:
        """The result with this chunk."""
        if not self._is_hidden:
            self._text += chunk.text
            self._token_ids += unpack_ids(chunk.token_ids).tolist()
            self._kept_mass.add(chunk.log_kept_masses)
            await self._add("output", chunk.logprobs)
        if chunk.prompt is not None:
            await self._add("input", chunk.prompt.logprobs)
        meta = self._meta(chunk) | self._token_logprobs() | self._kept_mass.whole()
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
        if report.disk_tokens:
            meta["disk_tokens"] = report.disk_tokens
        meta |= report_extras(report)
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
