"""Which sampling settings does a request mean, its own fields and the model's defaults together?"""

import time
from typing import Any

from radixrt.api.protocol import GenerationFields
from radixrt.config import ServerConfig
from radixrt.errors import RequestError
from radixrt.sampling_params import SamplingParams

_SAME_NAME = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip

LONGEST_STOP_STRING = 1024


def sampling_from_fields(
    fields: GenerationFields, defaults: dict[str, Any], vocab_size: int, **overrides: Any
) -> SamplingParams:
    """The request's settings over the model's defaults, checked.

    Raises:
        RequestError: a value is out of its range; names the field.
    """
    given: dict[str, Any] = dict(defaults)
    for name in _SAME_NAME:
        value = getattr(fields, name)
        if value is not None:
            given[name] = value
    given["stop"] = stop_strings(fields.stop)
    given["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    given["logit_bias"] = logit_bias(fields.logit_bias)
    given |= overrides
    return SamplingParams(**given).validate(vocab_size)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if any(len(s) > LONGEST_STOP_STRING for s in stops):
        raise RequestError(
            f"A stop string may have at most {LONGEST_STOP_STRING} characters.", param="stop"
        )
    return stops


def logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON has only strings as keys; they are token ids."""
    if not bias:
        return None
    try:
        return {int(token_id): float(value) for token_id, value in bias.items()}
    except ValueError as error:
        raise RequestError(
            "logit_bias must map token ids to numbers from -100 to 100.", param="logit_bias"
        ) from error


def deadline(timeout: float | None) -> float | None:
    """Unix time at which a request with this timeout in seconds is dropped."""
    if timeout is None:
        return None
    if not timeout > 0:
        raise RequestError("timeout must be above 0 seconds.", param="timeout")
    return time.time() + timeout


def priority(given: int | None, config: ServerConfig) -> int:
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
