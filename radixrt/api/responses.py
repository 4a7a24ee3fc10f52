"""JSON of usage, log-probabilities and reports, as the endpoints' responses have them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

from radixrt.messages.answers import AnswerChunk, AnswerReport, TokenLogprob, ValueEvent
from radixrt.messages.ids import unpack_ids

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks (as in OpenAI's API)."""


class Usage:
    """The usage of a request with one or several prompts and answers."""

    def __init__(self, hides_output: bool = False) -> None:
        """
        Args:
            hides_output: output tokens do not count, since the client does not get them.
        """
        self._hides_output = hides_output
        self._reports: dict[tuple[int, int], AnswerReport] = {}

    def add(self, prompt_index: int, chunk: AnswerChunk) -> None:
        self._reports[prompt_index, chunk.index] = chunk.report

    def as_json(self) -> dict[str, Any]:
        every = self._reports.values()
        # The other answers to a prompt find the first one's KV in the cache.
        first = [report for (_, index), report in self._reports.items() if index == 0]
        prompts = {prompt: report.prompt_tokens for (prompt, _), report in self._reports.items()}
        output_tokens = 0 if self._hides_output else sum(report.output_tokens for report in every)
        details = {
            "cached_tokens": sum(report.cached_tokens for report in first),
            "cache_write_tokens": sum(report.cache_write_tokens for report in first),
        }
        usage = usage_json(sum(prompts.values()), output_tokens, details)
        if retries := sum(report.retries for report in every):
            usage["structured_output_retries"] = retries
        return usage


def usage_json(
    prompt_tokens: int, completion_tokens: int, prompt_details: dict[str, int]
) -> dict[str, Any]:
    """OpenAI's ``usage`` object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": prompt_details,
    }


def structured_extras(report: AnswerReport) -> dict[str, Any]:
    """The ``structured_output`` object of a complete answer that was not held to all of its constraint."""
    if report.finish_reason is None or not (report.unenforced or report.violation):
        return {}
    unenforced = [msgspec.to_builtins(one) for one in report.unenforced]
    return {"structured_output": {"unenforced": unenforced, "violation": report.violation}}


def value_events(chunk: AnswerChunk) -> dict[str, Any]:
    """The ``values`` of a streamed choice; nothing if no value begins or ends in the chunk."""
    return {"values": [_value_event(event) for event in chunk.values]} if chunk.values else {}


def _value_event(event: ValueEvent) -> dict[str, Any]:
    told: dict[str, Any] = {
        "event": f"value.{event.event}",
        "pointer": event.pointer,
        "type": event.type,
    }
    if event.tool_call is not None:
        told["tool_call"] = event.tool_call
    if event.text is not None:
        line = event.text.replace("\n", " ").replace("\r", " ")  # an event's data is one line
        told |= {"value": orjson.Fragment(line), "validated": event.validated}
    return told


def json_logprob(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)


def chat_logprobs(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """The ``logprobs`` object of a chat choice."""
    if tokens is None:
        return None

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {
            "token": token.token,
            "logprob": json_logprob(token.logprob),
            "bytes": list(token.token_bytes),
        }

    content = [{**entry(t), "top_logprobs": [entry(other) for other in t.top]} for t in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprob] | None, first_offset: int = 0
) -> dict[str, Any] | None:
    """The ``logprobs`` object of a completion choice.

    Args:
        tokens: new tokens of the choice.
        first_offset: where in the choice's text, in characters, the first of them begins.
    """
    if tokens is None:
        return None
    offsets, offset = [], first_offset
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [t.token for t in tokens],
        "token_logprobs": [json_logprob(t.logprob) for t in tokens],
        "top_logprobs": [_top_by_text(t) for t in tokens],
        "text_offset": offsets,
    }


def _top_by_text(token: TokenLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for alternative in (*token.top, token):
        top.setdefault(alternative.token, json_logprob(alternative.logprob))
    return top


def prompt_logprobs(tokens: Sequence[TokenLogprob] | None) -> list[dict[str, Any] | None] | None:
    """The ``prompt_logprobs`` extension: for each token of the prompt, a map from token ids; None for
    the first."""
    if tokens is None:
        return None
    return [
        None
        if token.logprob is None
        else {
            str(t.token_id): {"logprob": json_logprob(t.logprob), "decoded_token": t.token}
            for t in (token, *token.top)
        }
        for token in tokens
    ]


def times_extras(report: AnswerReport) -> dict[str, Any]:
    """The ``times`` object of a complete answer; see :class:`radixrt.messages.answers.AnswerTimes`."""
    return {} if report.finish_reason is None else {"times": msgspec.to_builtins(report.times)}


def prompt_extras(chunk: AnswerChunk, wants_ids: bool) -> dict[str, Any]:
    """Fields beyond OpenAI's about the prompt, where they were asked for."""
    extras: dict[str, Any] = {}
    if chunk.prompt is None:
        return extras
    if wants_ids:
        extras["prompt_token_ids"] = unpack_ids(chunk.prompt.token_ids).tolist()
    if chunk.prompt.logprobs is not None:
        extras["prompt_logprobs"] = prompt_logprobs(chunk.prompt.logprobs)
    return extras
