"""What does an offline engine give back? The answers to a prompt, and what it is told of them."""

from dataclasses import dataclass, field

from radixrt.constrained.grammar import Unenforced
from radixrt.messages.answers import (
    AnswerChunk,
    AnswerTimes,
    FinishReason,
    PromptInfo,
    TokenLogprob,
)
from radixrt.messages.ids import unpack_ids


@dataclass(frozen=True)
class Answer:
    """One of the ``n`` answers to a prompt."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    times: AnswerTimes | None = None
    reasoning: str = ""
    """The thought before the answer (with ``reasoning_parser``, in chats)."""
    unenforced: tuple[Unenforced, ...] = ()
    """With ``strict=False``: what the answer was not held to."""
    violation: str | None = None
    """How it breaks that, if it does."""
    retries: int = 0
    """How often a part of it was taken back because a check found it invalid."""


@dataclass(frozen=True)
class Output:
    """What came of one prompt."""

    num_prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was in the radix tree."""
    cache_write_tokens: int = 0
    """Prompt tokens whose KV was computed and put there."""
    answers: list[Answer] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first answer."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first answer."""
        return self.answers[0].finish_reason


def output_of(chunks: list[AnswerChunk]) -> Output:
    """Put the answers of a request that did not stream together; each came as one chunk."""
    chunks.sort(key=lambda chunk: chunk.index)
    prompt: PromptInfo | None = next(
        (chunk.prompt for chunk in chunks if chunk.prompt is not None), None
    )
    return Output(
        num_prompt_tokens=0 if prompt is None else prompt.num_tokens,
        cached_tokens=chunks[0].cached_tokens,
        cache_write_tokens=chunks[0].cache_write_tokens,
        prompt_logprobs=None if prompt is None else prompt.logprobs,
        answers=[
            Answer(
                text=chunk.text,
                token_ids=unpack_ids(chunk.token_ids).tolist(),
                finish_reason=chunk.finish_reason,
                stop_reason=chunk.stop_reason,
                logprobs=chunk.logprobs,
                times=chunk.times,
                reasoning=chunk.reasoning,
                unenforced=chunk.unenforced,
                violation=chunk.violation,
                retries=chunk.retries,
            )
            for chunk in chunks
        ],
    )
