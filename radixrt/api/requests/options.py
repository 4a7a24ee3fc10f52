"""Reads the options of a request: sampling settings over the model's defaults, cache hints, priority, deadline and speculation."""

import time
from typing import Any

import msgspec

from radixrt.api.http.keys import Caller
from radixrt.api.requests.prompt_cache import with_prompt_cache
from radixrt.api.requests.protocol import GenerationFields, QueueFields
from radixrt.api.state import ServerState
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import Constraint
from radixrt.constrained.requests import check_sampling
from radixrt.kv.cache_hint import hints_of
from radixrt.messages.requests import RequestOptions

_SAME_NAME = set(SamplingParams.__struct_fields__) - {
    "logprobs",
    "prompt_logprobs_start",
    "bad_words_token_ids",
    "reasoning_opening_ids",
    "reasoning_closing_ids",
}
"""Fields of completions and chat with the same name and meaning here; ``logprobs`` means another thing in each."""

LONGEST_STOP_STRING = 1024
"""Characters."""


def generation_options(
    fields: GenerationFields,
    state: ServerState,
    caller: Caller,
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
    sampling = sampling_of({name: getattr(fields, name) for name in _SAME_NAME} | overrides, state)
    state.check_answer_count(num_prompts, sampling.n)
    check_sampling(constraint, sampling)
    return request_options(fields, state.config, caller, sampling)


def sampling_of(given: dict[str, Any], state: ServerState) -> SamplingParams:
    """Sampling settings over the model's defaults, validated: the only place where the api process does so.

    Args:
        given: by their names in :class:`SamplingParams`; None: not given.

    Raises:
        RequestError: a value is out of its range; names the field.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    if "logit_bias" in settings:
        settings["logit_bias"] = _logit_bias(settings["logit_bias"])
    stop = settings.get("stop", ())
    if any(len(one) > LONGEST_STOP_STRING for one in ([stop] if isinstance(stop, str) else stop)):
        raise RequestError(
            f"A stop string may have at most {LONGEST_STOP_STRING} characters.", param="stop"
        )
    return SamplingParams(**state.default_sampling | settings).validate(state.info.vocab_size)


def _logit_bias(bias: dict[str, float]) -> dict[int, float] | None:
    """JSON has only strings as keys; they are token ids."""
    try:
        return {int(token_id): value for token_id, value in bias.items()} or None
    except ValueError as error:
        raise RequestError(
            "logit_bias must map token ids to numbers from -100 to 100.", param="logit_bias"
        ) from error


def request_options(
    fields: QueueFields | GenerationFields,
    config: ServerConfig,
    caller: Caller,
    sampling: SamplingParams | None = None,
) -> RequestOptions:
    """The options of a request.

    Args:
        sampling: None: the request brings no sampling settings.

    Raises:
        RequestError: a value is out of its range; names the field.
    """
    hints = with_prompt_cache(hints_of(fields.cache), fields)
    return RequestOptions(
        sampling=sampling or SamplingParams(),
        tenant=caller.tenant,
        cache_salt=fields.cache_salt or "",
        cache_hints=msgspec.structs.replace(
            hints,
            session=caller.session(hints.session),
            explain_texts=hints.explain and caller.sees_own_texts,
        ),
        priority=_priority(fields.priority, config),
        deadline=_deadline(fields.timeout, config.max_timeout),
        speculation=fields.speculation is not False,
    )


def _deadline(timeout: float | None, most_s: float) -> float | None:
    """Unix time at which a request with this timeout in seconds is dropped."""
    if timeout is None:
        return None
    if not 0 < timeout <= most_s:
        raise RequestError(
            f"timeout must be above 0 and at most {most_s:g} seconds (--max-timeout).",
            param="timeout",
        )
    return time.time() + timeout


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
        raise RequestError(
            "priority must lie between -2147483648 and 2147483647.", param="priority"
        )
    return given
