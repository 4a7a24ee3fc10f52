"""The interface of all backends: a matcher holds the state of one sequence in its grammar."""

import abc
from collections.abc import Sequence
from typing import Self

import numpy as np

from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.tokenizer_facts import TokenizerFacts

MAX_FORCED = 256
"""Most tokens that a matcher forces at a time. A grammar can force more than any answer has, or
tokens without end; the worker finds them inside a step, and every sequence waits. (The finite-state
machine has no more states than this.)"""


class Matcher(abc.ABC):
    """The state of a sequence in its grammar. Not thread-safe; different matchers may be used in
    parallel.

    End tokens are those of the tokenizer facts: they are allowed exactly where the grammar may end,
    and taking one ends it. They are handled here, not by the libraries.
    """

    __slots__ = ("_ended", "_taken", "facts")

    def __init__(self, facts: TokenizerFacts) -> None:
        self.facts = facts
        self._taken: list[int] = []
        """The tokens taken, without the end token."""
        self._ended = False

    @property
    def is_ambiguous(self) -> bool:
        """Its calls may take long, see :class:`radixrt.constrained.grammar.Grammar`."""
        return False

    def advance(self, token_ids: Sequence[int]) -> int:
        """Take tokens; returns how many: all, or those before the first not allowed."""
        if self._ended:
            return 0
        ends = self.facts.eos_token_ids
        text = list(token_ids)
        for index, token_id in enumerate(token_ids):
            if token_id in ends or not 0 <= token_id < self.facts.vocab_size:
                del text[index:]
                break
        num_taken = self._take(text) if text else 0
        self._taken += text[:num_taken]
        if num_taken == len(text) < len(token_ids) and token_ids[num_taken] in ends:
            self._ended = self._may_end()
        return num_taken + self._ended

    def rollback(self, num_tokens: int) -> None:
        """Give back the last tokens taken."""
        if num_tokens > len(self._taken) + self._ended:
            raise ValueError(f"can't give back {num_tokens} tokens of {len(self._taken)}")
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            del self._taken[-num_tokens:]
            self._give_back(num_tokens)

    def fill_mask(self, row: BitmaskRow) -> None:
        """Write the tokens that may come next over ``row``, a C-contiguous row of the bitmask."""
        if self._ended:
            row[:] = self.facts.eos_mask
        else:
            self._fill(row)

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as many as are certain, at most MAX_FORCED; without end
        tokens, often none.

        They are those that decoding step by step with :meth:`fill_mask` would be left with.
        """
        return [] if self._ended else self._forced()

    def is_terminated(self) -> bool:
        """Nothing but an end token may come."""
        if self._ended or not self._may_end():
            return self._ended
        row = np.empty_like(self.facts.eos_mask)
        self._fill(row)
        return bool((row == self.facts.eos_mask).all())

    def fork(self) -> Self:
        """An independent matcher in the same state."""
        copy = self._copy()
        copy._taken, copy._ended = self._taken.copy(), self._ended
        return copy

    # ------------------------------------------------------------ methods of each library

    @abc.abstractmethod
    def _take(self, token_ids: list[int]) -> int:
        """Take tokens of the vocabulary, none of which is an end token; returns how many."""

    @abc.abstractmethod
    def _give_back(self, num_tokens: int) -> None: ...

    @abc.abstractmethod
    def _fill(self, row: BitmaskRow) -> None: ...

    @abc.abstractmethod
    def _forced(self) -> list[int]: ...

    @abc.abstractmethod
    def _may_end(self) -> bool: ...

    @abc.abstractmethod
    def _copy(self) -> Self:
        """One in the same state but for the tokens taken."""
