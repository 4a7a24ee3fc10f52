"""The results that ``LLM`` returns: outputs with their answers, vectors, and pinned prompts."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from radixrt.base.errors import RequestError
from radixrt.client.pooling import Vector
from radixrt.client.warming import Pinned
from radixrt.messages.answers import AnswerChunk, AnswerReport, FinishReason, TokenLogprob
from radixrt.messages.ids import unpack_ids


class Answer(AnswerReport, frozen=True, kw_only=True, array_like=False):
    """One of the ``n`` answers to a prompt, with every field of its
    :class:`~radixrt.messages.answers.AnswerReport`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    """One for each token, if asked for."""
    kept_mass: list[float] | None = None
    """One for each token, if asked for: the probability that the constraint left of all tokens."""
    log_kept_mass: float | None = None
    """The sum of their logarithms."""
    reasoning: str = ""
    """The text of the reasoning before the answer (with ``reasoning_parser``, in chats)."""


@dataclass(frozen=True)
class Output:
    """The answers to one prompt. Its properties are those of the first answer."""

    answers: list[Answer]
    prompt_logprobs: list[TokenLogprob] | None = None
    """One for each token of the prompt, if asked for."""

    @property
    def num_prompt_tokens(self) -> int:
        return self.answers[0].prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was in the radix tree."""
        return self.answers[0].cached_tokens

    @property
    def cache_write_tokens(self) -> int:
        """Prompt tokens whose KV was computed and put into the radix tree."""
        return self.answers[0].cache_write_tokens

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.answers[0].finish_reason


def output_from_chunks(chunks: list[AnswerChunk]) -> Output:
    """The output of a request that was not streamed.

    Args:
        chunks: the only one of each answer.
    """
    chunks.sort(key=lambda chunk: chunk.index)
    prompt = next((chunk.prompt for chunk in chunks if chunk.prompt is not None), None)
    logprobs = None if prompt is None or prompt.logprobs is None else list(prompt.logprobs)
    answers = [
        Answer(
            text=chunk.text,
            token_ids=unpack_ids(chunk.token_ids).tolist(),
            logprobs=None if chunk.logprobs is None else list(chunk.logprobs),
            reasoning=chunk.reasoning,
            **_kept_mass(chunk),
            **msgspec.structs.asdict(chunk.report),
        )
        for chunk in chunks
    ]
    return Output(answers, logprobs)


def _kept_mass(chunk: AnswerChunk) -> dict[str, Any]:
    logs = chunk.log_kept_masses
    return {"kept_mass": [*map(math.exp, logs)], "log_kept_mass": sum(logs)} if logs else {}


@dataclass(frozen=True, eq=False)
class Embedding:
    """The vector of one prompt."""

    vector: Vector
    """float32: [numbers]"""
    num_prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the radix tree; 0 with encoders, which keep none."""


class PinnedPrompt(Pinned, frozen=True, kw_only=True):
    """A prompt whose KV stays until the end of a ``with`` block, :meth:`release`, or the end of its
    lease."""

    release_lease: Callable[[str], int]

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens

    def release(self) -> int:
        """End the lease; returns the number of tokens that were pinned.

        Raises:
            RequestError: it has ended already.
        """
        return self.release_lease(self.lease)

    def __enter__(self) -> "PinnedPrompt":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(RequestError):  # its time was over
            self.release()
