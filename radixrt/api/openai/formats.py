"""How do usage and log-probabilities look in OpenAI's responses?"""

from collections.abc import Sequence
from typing import Any

import msgspec

from radixrt.messages.answers import AnswerChunk, TokenLogprob
from radixrt.messages.ids import unpack_ids

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks (as in OpenAI's API)."""


class Usage:
    """Counts the tokens of a request with one or several prompts and answers."""

    def __init__(self, hides_output: bool = False) -> None:
        """
        Args:
            hides_output: its tokens do not count, since nobody gets them.
        """
        self._hides_output = hides_output
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._cache_write_tokens: dict[int, int] = {}
        self._output_tokens: dict[tuple[int, int], int] = {}
        self._retries: dict[tuple[int, int], int] = {}

    def add(self, prompt_index: int, chunk: AnswerChunk) -> None:
        if chunk.prompt is not None:
            self._prompt_tokens[prompt_index] = chunk.prompt.num_tokens
        if chunk.index == 0:  # the other answers to a prompt find the first one's work in the cache
            self._cached_tokens[prompt_index] = chunk.cached_tokens
            self._cache_write_tokens[prompt_index] = chunk.cache_write_tokens
        self._output_tokens[prompt_index, chunk.index] = chunk.num_output_tokens
        self._retries[prompt_index, chunk.index] = chunk.retries

    def as_json(self) -> dict[str, Any]:
        prompt_tokens = sum(self._prompt_tokens.values())
        output_tokens = 0 if self._hides_output else sum(self._output_tokens.values())
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(self._cached_tokens.values()),
                "cache_write_tokens": sum(self._cache_write_tokens.values()),
            },
        }
        if retries := sum(self._retries.values()):
            usage["structured_output_retries"] = retries
        return usage


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
        tokens: what it describes.
        first_offset: where in the choice's text, in characters, the first token begins.
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


def times_extras(chunk: AnswerChunk) -> dict[str, Any]:
    """Where an answer's time went, with its last chunk; see :class:`radixrt.messages.answers.AnswerTimes`."""
    if chunk.times is None:
        return {}
    return {"times": msgspec.to_builtins(chunk.times)}


def prompt_extras(chunk: AnswerChunk, wants_ids: bool) -> dict[str, Any]:
    """Fields beyond OpenAI's about the prompt, where they were asked for."""
    extras: dict[str, Any] = {}
    if chunk.prompt is None:
        return extras
    if wants_ids and chunk.prompt.token_ids is not None:
        extras["prompt_token_ids"] = unpack_ids(chunk.prompt.token_ids).tolist()
    if chunk.prompt.logprobs is not None:
        extras["prompt_logprobs"] = prompt_logprobs(chunk.prompt.logprobs)
    return extras
