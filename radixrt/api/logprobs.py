"""JSON of log-probabilities, in the forms of the endpoints; long lists are made in slices, between
which other requests go on."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

from radixrt.messages.answers import TokenLogprob, TokenLogprobs

_LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks (as in OpenAI's API)."""

SLICE_POSITIONS = 128
"""Positions in a slice: with 20 alternatives each, some milliseconds."""


class JsonList:
    """The text of a JSON array that grows."""

    def __init__(self) -> None:
        self._text = bytearray()

    def extend(self, items: list[Any]) -> None:
        if items:
            self._text += b"," if self._text else b""
            self._text += orjson.dumps(items)[1:-1]

    def json(self) -> orjson.Fragment:
        """A list that :func:`orjson.dumps` writes."""
        return orjson.Fragment(b"".join((b"[", self._text, b"]")))


def json_logprob(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LOWEST_LOGPROB)


async def in_slices(tokens: TokenLogprobs) -> AsyncIterator[list[TokenLogprob]]:
    """All positions, some at a time; other requests go on in between."""
    for number, rows in enumerate(tokens.in_slices(SLICE_POSITIONS)):
        if number:
            await asyncio.sleep(0)
        yield rows


async def chat_logprobs(tokens: TokenLogprobs | None) -> dict[str, Any] | None:
    """The ``logprobs`` object of a chat choice."""
    if tokens is None:
        return None
    return {"content": await _each(tokens, _with_top), "refusal": None}


async def chat_entries(tokens: TokenLogprobs | None) -> list[orjson.Fragment]:
    """The JSON of each element of its ``content``, for APIs that send them more than once."""
    if tokens is None:
        return []
    slices = [[orjson.dumps(_with_top(row)) for row in rows] async for rows in in_slices(tokens)]
    return [orjson.Fragment(entry) for entries in slices for entry in entries]


def _with_top(token: TokenLogprob) -> dict[str, Any]:
    return {**_entry(token), "top_logprobs": [_entry(other) for other in token.top]}


def _entry(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.token,
        "logprob": json_logprob(token.logprob),
        "bytes": list(token.token_bytes),
    }


class KeptMass:
    """The ``constraint`` object of a choice: the probability that its constraint left.

    >>> choice = KeptMass()
    >>> choice.after([0.0, math.log(0.5)])
    {'constraint': {'kept_mass': [1.0, 0.5], 'log_kept_mass': -0.6931471805599453}}
    >>> choice.after([math.log(0.25)])["constraint"]["log_kept_mass"] == math.log(0.125)
    True
    >>> KeptMass().after([])
    {}
    """

    def __init__(self) -> None:
        self._masses: list[float] = []
        self._log_total = 0.0

    def add(self, logs: list[float]) -> None:
        """Take in further tokens: the logarithms of their masses."""
        self._masses += map(math.exp, logs)
        self._log_total += sum(logs)

    def after(self, logs: list[float]) -> dict[str, Any]:
        """The fields of an event with these tokens: their masses, and the total up to here."""
        first = len(self._masses)
        self.add(logs)
        return self._fields(self._masses[first:]) if logs else {}

    def whole(self) -> dict[str, Any]:
        """The fields of the answer so far."""
        return self._fields([*self._masses]) if self._masses else {}

    def _fields(self, masses: list[float]) -> dict[str, Any]:
        return {"constraint": {"kept_mass": masses, "log_kept_mass": self._log_total}}


class CompletionLogprobs:
    """The ``logprobs`` objects of a completion choice, one for each event."""

    def __init__(self) -> None:
        self._offset = 0
        """Place in the choice's text, in characters, where the next token begins."""

    async def json(self, *new: TokenLogprobs) -> dict[str, Any]:
        """
        Args:
            new: tokens of the choice that follow those of the calls before.
        """
        texts, values, top, offsets = JsonList(), JsonList(), JsonList(), JsonList()
        for tokens in new:
            async for rows in in_slices(tokens):
                texts.extend([row.token for row in rows])
                values.extend([json_logprob(row.logprob) for row in rows])
                top.extend([_top_by_text(row) for row in rows])
                offsets.extend([self._next_offset(row) for row in rows])
        return {
            "tokens": texts.json(),
            "token_logprobs": values.json(),
            "top_logprobs": top.json(),
            "text_offset": offsets.json(),
        }

    def _next_offset(self, token: TokenLogprob) -> int:
        offset = self._offset
        self._offset += len(token.token)
        return offset


def _top_by_text(token: TokenLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    top: dict[str, float | None] = {}
    for alternative in (*token.top, token):
        top.setdefault(alternative.token, json_logprob(alternative.logprob))
    return top


async def prompt_logprobs(tokens: TokenLogprobs) -> orjson.Fragment:
    """The ``prompt_logprobs`` extension: for each token of the prompt, a map from token ids; null
    for the first."""

    def by_id(token: TokenLogprob) -> dict[str, Any] | None:
        if token.logprob is None:
            return None
        return {
            str(t.token_id): {"logprob": json_logprob(t.logprob), "decoded_token": t.token}
            for t in (token, *token.top)
        }

    return await _each(tokens, by_id)


async def _each(tokens: TokenLogprobs, entry: Callable[[TokenLogprob], Any]) -> orjson.Fragment:
    """The JSON array of the entries of all positions."""
    entries = JsonList()
    async for rows in in_slices(tokens):
        entries.extend([entry(row) for row in rows])
    return entries.json()
