"""Reads the id and the options of a request: sampling settings over the model's defaults, cache
hints, priority, deadline and speculation."""

import time
from contextvars import ContextVar
from typing import Any

from msgspec.structs import replace

from radixrt.api.http.middleware import new_id
from radixrt.api.requests.protocol import (
    TTL_S,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationFields,
    QueueFields,
)
from radixrt.api.state import Context, ServerState
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError, shown, wrong
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import Constraint
from radixrt.constrained.requests import check_sampling
from radixrt.kv.cache_hint import (
    LONGEST_SESSION,
    hints_of,
    prepares_next_turn,
    shares_answers,
)
from radixrt.messages.requests import CacheHints, RequestOptions, Retention

_SAME_NAME = set(SamplingParams.__struct_fields__) - {
    "logprobs",
    "prompt_logprobs_start",
    "bad_words_token_ids",
    "reasoning_opening_ids",
    "reasoning_closing_ids",
}
"""Fields of completions and chat with the same name and meaning here; ``logprobs`` means another
thing in each."""

MAX_STOP_CHARS = 1024
"""Longest stop string."""
MAX_ID_CHARS = 256
"""Longest id that a client may choose."""

_RETENTIONS = ("in_memory", "24h")
_MODES = ("implicit", "explicit")


def request_id(prefix: str, *chosen: str | None) -> str:
    """The first id of ``chosen`` that the client has given, else a new one that nobody can guess.

    Raises:
        RequestError: it can't stand in a header.
    """
    given = next((name for name in chosen if name is not None), None)
    if given is None:
        return new_id(prefix)
    if not (0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable()):
        raise wrong("rid", f"must have 1 to {MAX_ID_CHARS} printable ASCII characters")
    return given


def check_answer_count(config: ServerConfig, num_prompts: int, n: int = 1) -> None:
    """Raises RequestError if one HTTP request asks for more answers than the queue can ever hold."""
    if num_prompts * n > config.max_queued_requests:
        raise RequestError(
            f"The request asks for {num_prompts * n} answers ({num_prompts} prompts, n={n}); this "
            f"server takes at most {config.max_queued_requests} in one request "
            "(--max-queued-requests)."
        )


def wants_receipt(fields: GenerationFields, context: Context) -> bool:
    """Whether answers are to have receipts: by the field, or by a header, which a proxy can add."""
    if fields.receipt is not None:
        return fields.receipt
    return context.request.headers.get("x-radixrt-receipt", "").lower() == "true"


def generation_options(
    fields: CompletionRequest | ChatCompletionRequest,
    context: Context,
    constraint: Constraint | None,
    num_prompts: int = 1,
    **overrides: Any,
) -> RequestOptions:
    """The options of a request to chat or completions.

    Args:
        constraint: the request's constraint.
        overrides: sampling settings in place of those of the fields.

    Raises:
        RequestError: a value is out of its range, or does not fit the constraint; names the field.
    """
    given = {name: getattr(fields, name) for name in _SAME_NAME} | overrides
    sampling = sampling_of(given, context.state)
    check_answer_count(context.state.config, num_prompts, sampling.n)
    check_sampling(constraint, sampling)
    if fields.return_progress and not fields.stream:
        raise wrong(
            "return_progress", "is for streams: set stream to true, or leave return_progress out"
        )
    options = request_options(fields, context, sampling)
    return replace(options, progress=bool(fields.return_progress))


def sampling_of(given: dict[str, Any], state: ServerState) -> SamplingParams:
    """Sampling settings over the model's defaults, validated: the only place where the api process
    does so.

    Args:
        given: by their names in :class:`SamplingParams`; None: not given.

    Raises:
        RequestError: a value is out of its range; names the field.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in settings:
        settings["logit_bias"] = _logit_bias(settings["logit_bias"])
    stop = settings.get("stop", ())
    if any(len(one) > MAX_STOP_CHARS for one in ([stop] if isinstance(stop, str) else stop)):
        raise RequestError(
            f"A stop string may have at most {MAX_STOP_CHARS} characters.", param="stop"
        )
    return SamplingParams(**state.default_sampling | settings).validate(state.info.vocab_size)


def _logit_bias(bias: dict[str, float]) -> dict[int, float] | None:
    """JSON has only strings as keys; they are token ids."""
    try:
        return {int(token_id): value for token_id, value in bias.items()} or None
    except ValueError as error:
        raise wrong("logit_bias", "must map token ids to numbers from -100 to 100") from error


waited_s: ContextVar[float] = ContextVar("waited_s", default=0.0)
"""Seconds for which the request of this task has waited until its model was loaded."""


def request_options(
    fields: QueueFields | GenerationFields,
    context: Context,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008  # immutable
) -> RequestOptions:
    """The options of a request.

    Raises:
        RequestError: a value is out of its range; names the field.
    """
    caller, config = context.caller, context.state.config
    hints = _with_prompt_cache(hints_of(fields.cache), fields)
    return RequestOptions(
        sampling=sampling,
        tenant=caller.tenant,
        root=context.root(fields.cache_salt),
        adapter_name="" if context.adapter is None else context.adapter.name,
        cache_hints=replace(
            hints,
            session=caller.session(hints.session),
            explain_texts=hints.explain and caller.sees_own_texts,
        ),
        priority=_priority(fields.priority, config),
        deadline=_deadline(fields.timeout, config.max_timeout),
        speculation=fields.speculation is not False,
        prepares_next_turn=prepares_next_turn(
            fields.cache, config.prepare_next_turns, config.idle_share
        ),
        shares_answers=shares_answers(fields.cache, config.disable_shared_answers),
    )


def _with_prompt_cache(hints: CacheHints, fields: QueueFields | GenerationFields) -> CacheHints:
    """Cache hints with the meaning of OpenAI's fields added. Those of the field ``cache`` win.

    Raises:
        RequestError: a value is none that OpenAI's API has; names the field.
    """
    if not isinstance(fields, GenerationFields):  # OpenAI's API has them here alone
        return hints
    key = fields.prompt_cache_key
    if key and len(key) > LONGEST_SESSION:
        raise wrong("prompt_cache_key", f"may have at most {LONGEST_SESSION} characters")
    if key and not hints.session:
        hints = replace(hints, session=key)
    ttl_s = _lifetime_s(fields)
    if ttl_s is not None and not hints.retain:
        hints = replace(hints, retain=[Retention("high", None, ttl_s)])
    return hints


def _lifetime_s(fields: GenerationFields) -> float | None:
    """Seconds for which all of the request's KV is to be retained before that of others."""
    retention = fields.prompt_cache_retention
    _check(retention, _RETENTIONS, "prompt_cache_retention")
    options = fields.prompt_cache_options
    if options is not None:
        _check(options.mode, _MODES, "prompt_cache_options.mode")
        _check(options.ttl, TTL_S, "prompt_cache_options.ttl")
        if options.ttl is not None and options.mode != "explicit":
            return TTL_S[options.ttl]
    return TTL_S["24h"] if retention == "24h" else None


def _check(value: str | None, known: Any, field: str) -> None:
    if value is not None and value not in known:
        raise wrong(field, f"must be one of {', '.join(known)}, not {shown(value)}")


def _deadline(timeout: float | None, max_s: float) -> float | None:
    """Unix time at which a request with this timeout in seconds is dropped."""
    if timeout is None:
        return None
    if not 0 < timeout <= max_s:
        raise wrong("timeout", f"must be above 0 and at most {max_s:g} seconds (--max-timeout)")
    return time.time() + timeout - waited_s.get()


def _priority(given: int | None, config: ServerConfig) -> int:
    """The request's place in the queue; the smallest goes first.

    Raises:
        RequestError: the server would ignore it, or it is no 32-bit number.
    """
    if not given:
        return 0
    if config.schedule_policy != "priority":
        raise RequestError(
            "This server does not order requests by priority: leave it out, or start the server with "
            "--schedule-policy priority.",
            param="priority",
        )
    if not -(2**31) <= given < 2**31:
        raise wrong("priority", "must lie between -2147483648 and 2147483647")
    return given
