"""Scores texts by their log-probabilities behind one prompt, in one batch, so that the prompt is
computed once.

``/score_choices``, ``LLM.score`` and the language's ``select`` use it.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from radixrt.base.errors import RequestError, wrong
from radixrt.base.sampling_params import SamplingParams
from radixrt.client.engine_client import EngineClient, RunRequests
from radixrt.messages.answers import AnswerChunk
from radixrt.messages.calls import TokenizeCall
from radixrt.messages.ids import TokenIds, pack_ids
from radixrt.messages.requests import (
    ChatPrompt,
    GenerateRequest,
    Prompt,
    RequestOptions,
    TextPrompt,
    TokenPrompt,
)

TAIL_CHARS = 1024
"""Length of the end of a text that is encoded anew with each choice behind it."""

AT_ONCE = 64
"""Choices encoded at a time."""

MAX_SCORED_TOKENS = 1 << 24
"""Most tokens of all choices, each with the prompt before it."""

Item = TypeVar("Item")


class ChoiceScore(msgspec.Struct, frozen=True, kw_only=True):
    """The log-probabilities of one choice, token by token."""

    logprobs: list[float]
    """The log-probabilities of its tokens behind the prompt. All choices begin at the same token:
    the first that one of them changes."""
    unconditional_logprobs: list[float] | None = None
    """Log-probabilities of the same tokens behind the prompt's first token alone, where they were
    asked for."""


class ChoiceScores(msgspec.Struct, frozen=True, kw_only=True):
    scores: list[ChoiceScore]
    """One for each choice, in their order."""
    prompt_tokens: int
    """Tokens of the prompt alone."""
    cached_tokens: int
    """Prompt tokens that were in the radix tree and not computed for any of the choices."""
    choice_tokens: int
    """Tokens of all choices together."""


@dataclass(frozen=True)
class ChoiceQuestion:
    """A prompt, and the texts that may come behind it."""

    prompt: TextPrompt | ChatPrompt
    """The prompt. Each choice of a chat is (or with ``continue_final_message`` continues) the
    assistant's message."""
    choices: Sequence[str]
    unconditional: bool = False

    def check(self) -> None:
        """Raises RequestError if there is nothing to score."""
        if not self.choices:
            raise wrong("choices", "is empty; give at least one text")
        for index, choice in enumerate(self.choices):
            if not choice:
                raise wrong(
                    f"choices[{index}]", "is empty, and nothing can't be scored; leave it out"
                )


async def score_choices(
    client: EngineClient,
    run: RunRequests,
    request_id: str,
    question: ChoiceQuestion,
    options: RequestOptions,
) -> ChoiceScores:
    """Encode the prompt with each choice behind it, and score the tokens that differ.

    A choice's first characters may join the prompt's last token. So the scores begin at the first
    token in which one of the encoded texts differs from the prompt alone: at the same token for
    all.

    Args:
        client: encodes the texts.
        run: computes the requests, one for each text.
        request_id: theirs, with a number behind it.
        options: of the requests; their sampling settings are not used.

    Raises:
        RequestError: there is nothing to score, or the engine refuses the prompt, or drops a
            request.
        EngineDiedError: the engine ended.
    """
    question.check()
    alone, whole = await _encoded(client, question, options)
    if (num_tokens := sum(map(len, whole))) > MAX_SCORED_TOKENS:
        raise RequestError(
            f"The choices, each behind the prompt, have {num_tokens} tokens; at most {MAX_SCORED_TOKENS} are scored in one "
            "request. Split it.",
            param="choices",
        )
    start = len(alone)
    async for some in _in_slices(whole, AT_ONCE):
        start = min(start, *(shared_tokens(alone, ids) for ids in some))
    start = max(start, 1)  # nothing comes before the first token that could make it likely
    settings = msgspec.structs.replace(options, sampling=_logprobs_from(start))
    bare_settings = msgspec.structs.replace(options, sampling=_logprobs_from(1))
    requests: list[GenerateRequest] = []

    def add(ids: TokenIds, settings: RequestOptions) -> None:
        requests.append(
            GenerateRequest(
                request_id=f"{request_id}-{len(requests)}",
                group_id=request_id,
                prompt=TokenPrompt(pack_ids(ids)),
                options=settings,
            )
        )

    async for some in _in_slices(whole, AT_ONCE):
        for ids in some:
            add(ids, settings)
    if question.unconditional:  # behind the text's first token alone: something has to stand there
        async for some in _in_slices(whole, AT_ONCE):
            for ids in some:
                add(np.concatenate([ids[:1], ids[start:]]), bare_settings)
    chunks = await run(requests)
    if any(chunk.finish_reason == "abort" for chunk in chunks):
        raise RequestError("The request was dropped before all was scored.", status=408)
    found = [_logprobs(chunk) for chunk in chunks]
    without = found[len(whole) :] if question.unconditional else [None] * len(whole)
    num_choice_tokens = sum(len(ids) - start for ids in whole)
    num_computed = sum(
        len(ids) - chunk.report.cached_tokens for ids, chunk in zip(whole, chunks, strict=False)
    )
    return ChoiceScores(
        scores=[
            ChoiceScore(logprobs=given, unconditional_logprobs=bare)
            for given, bare in zip(found[: len(whole)], without, strict=True)
        ],
        prompt_tokens=len(alone),
        cached_tokens=min(max(len(alone) + num_choice_tokens - num_computed, 0), len(alone)),
        choice_tokens=num_choice_tokens,
    )


def _logprobs_from(start: int) -> SamplingParams:
    """Settings that return the log-probabilities of a prompt's tokens from ``start`` on."""
    return SamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start
    )


async def _encoded(
    client: EngineClient, question: ChoiceQuestion, options: RequestOptions
) -> tuple[TokenIds, list[TokenIds]]:
    """The prompt alone, and with each choice behind it."""

    async def encode(prompt: Prompt) -> TokenIds:
        call = TokenizeCall(prompt, options.tenant, options.root)
        return np.array((await client.call(call)).token_ids, dtype=np.int32)

    async def encode_behind(beginning: TextPrompt | ChatPrompt) -> list[TokenIds]:
        size = 1 if isinstance(beginning, TextPrompt) else len(beginning.messages)
        encoded: list[TokenIds] = []
        async for some in _in_slices(question.choices, max(1, AT_ONCE // size)):
            encoded += await asyncio.gather(*(encode(followed_by(beginning, c)) for c in some))
        return encoded

    prompt = question.prompt
    alone = await encode(prompt)
    if isinstance(prompt, TextPrompt) and len(prompt.text) > 2 * TAIL_CHARS:
        tail = TextPrompt(prompt.text[-TAIL_CHARS:], add_special_tokens=False)
        ends = await encode(tail)
        tails = await encode_behind(tail)
        skipped = _joint(alone, ends)
        if skipped is not None and all(shared_tokens(ids, ends) > skipped for ids in tails):
            head = alone[: len(alone) - (len(ends) - skipped)]
            whole: list[TokenIds] = []
            async for some in _in_slices(tails, AT_ONCE):
                whole += [np.concatenate([head, ids[skipped:]]) for ids in some]
            return alone, whole
    return alone, await encode_behind(prompt)


async def _in_slices(items: Sequence[Item], size: int) -> AsyncIterator[Sequence[Item]]:
    """Slices of at most ``size`` items; other requests go on in between."""
    for begin in range(0, len(items), size):
        await asyncio.sleep(0)
        yield items[begin : begin + size]


def _joint(whole: TokenIds, tail: TokenIds) -> int | None:
    """Index of the first token of ``tail`` from which it equals the end of ``whole``. None: not
    even the last quarter is equal."""
    num_same = shared_tokens(whole[::-1], tail[::-1])
    return len(tail) - num_same if num_same > len(tail) // 4 else None


def _logprobs(chunk: AnswerChunk) -> list[float]:
    assert chunk.prompt is not None and chunk.prompt.logprobs is not None
    return chunk.prompt.logprobs.chosen()


def followed_by(prompt: TextPrompt | ChatPrompt, text: str) -> TextPrompt | ChatPrompt:
    """A prompt with a text behind it: in a chat, as (a part of) the assistant's message."""
    if isinstance(prompt, TextPrompt):
        return TextPrompt(prompt.text + text, prompt.add_special_tokens)
    if prompt.continue_final_message:
        *before, last = prompt.messages
        messages = [*before, {**last, "content": last["content"] + text}]
    else:
        messages = [*prompt.messages, {"role": "assistant", "content": text}]
    return msgspec.structs.replace(
        prompt, messages=messages, add_generation_prompt=False, continue_final_message=True
    )


def shared_tokens(one: ArrayLike, other: ArrayLike) -> int:
    """Length of the common prefix of two sequences.

    >>> shared_tokens([1, 2, 3], [1, 2, 4, 5])
    2
    """
    first, second = np.asarray(one), np.asarray(other)
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
