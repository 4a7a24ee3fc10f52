"""Seeded workloads for a server, as token ids or as text.

Every workload is a list of conversations: a context that comes first, and questions that follow one
another, each answered before the next. A workload of single requests has conversations of one
question.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixrt.bench.arguments import WorkloadName

Prompt = list[int] | str

SYLLABLES = [onset + vowel for onset in "bdfgklmnprstvz" for vowel in "aeiou"]
TOKENS_PER_WORD = 2.0
"""Approximate tokens of a pseudo-word of two syllables with usual vocabularies. The report has the
token counts of the server."""


@dataclass(frozen=True)
class Turn:
    question: Prompt
    output_len: int
    """Tokens to generate."""


@dataclass(frozen=True)
class Conversation:
    context: Prompt
    """Document or system prompt; may be empty."""
    turns: list[Turn]
    messages: list[dict[str, Any]] | None = None
    """Messages of a recorded chat request, which is sent as it is; context and question are empty
    then."""
    arrival_s: float | None = None
    """Recorded time of the first question, in seconds after the beginning of the recording."""


@dataclass(frozen=True)
class WorkloadSettings:
    """Lengths are in tokens (with text prompts: approximate)."""

    name: WorkloadName
    num_prompts: int
    """Requests in all; every turn is one."""
    input_len: int
    """Mean length of a question."""
    output_len: int
    """Mean length of an answer."""
    length_spread: float
    """Standard deviation of the logarithm of both lengths (they are log-normal); 0: all equal."""
    prefix_len: int
    """Length of a shared document, or of the chats' common system prompt."""
    groups: int
    """Number of shared documents."""
    turns: int
    """Questions of a chat."""
    seed: int


class TokenPrompts:
    """Makes prompts of uniformly random token ids."""

    def __init__(self, rng: np.random.Generator, vocab_size: int) -> None:
        self._rng = rng
        # Special tokens sit at the ends of a vocabulary; some of them would change the measured
        # quantities.
        self._low, self._high = vocab_size // 8, max(vocab_size * 7 // 8, vocab_size // 8 + 1)

    def __call__(self, length: int) -> list[int]:
        return self._rng.integers(self._low, self._high, size=length).tolist()


class TextPrompts:
    """Makes prompts of pseudo-words, for servers that take no token ids."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def __call__(self, length: int) -> str:
        count = max(1, round(length / TOKENS_PER_WORD)) if length else 0
        pairs = self._rng.choice(SYLLABLES, size=(count, 2))
        return "".join(f"{first}{second} " for first, second in pairs)


def make_workload(settings: WorkloadSettings, vocab_size: int | None) -> list[Conversation]:
    """The conversations of a workload, in order of arrival; the same for the same settings.

    Args:
        settings: of the workload.
        vocab_size: prompts are made of token ids below it; None: of text.
    """
    rng = np.random.default_rng(settings.seed)
    prompt: Callable[[int], Prompt]
    prompt = TextPrompts(rng) if vocab_size is None else TokenPrompts(rng, vocab_size)

    def turn() -> Turn:
        question = prompt(_length(rng, settings.input_len, settings.length_spread))
        return Turn(question, _length(rng, settings.output_len, settings.length_spread))

    if settings.name == "random":
        return [Conversation(prompt(0), [turn()]) for _ in range(settings.num_prompts)]
    if settings.name == "multi-turn":
        system = prompt(settings.prefix_len)
        count = math.ceil(settings.num_prompts / settings.turns)
        return [Conversation(system, [turn() for _ in range(settings.turns)]) for _ in range(count)]
    documents = [prompt(settings.prefix_len) for _ in range(settings.groups)]
    order = rng.permutation(settings.num_prompts) % settings.groups
    return [Conversation(documents[group], [turn()]) for group in order]


def _length(rng: np.random.Generator, mean: int, spread: float) -> int:
    if spread == 0:
        return mean
    # The mean of a log-normal is exp(mu + sigma² / 2).
    return max(1, round(rng.lognormal(math.log(mean) - spread**2 / 2, spread)))
