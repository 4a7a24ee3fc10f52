"""Ends the reasoning of a sequence when it has used its tokens, by forcing the tokens that close
it."""

import copy
from collections.abc import Sequence

from radixrt.base.sampling_params import SamplingParams
from radixrt.base.tags import SymbolsOf, TagFinder, tag_symbols
from radixrt.messages.ids import TokenIds

_BEFORE_OPENING = 4
"""Tokens of white space, at most, that an answer may have before it opens its reasoning; a tag that
is begun is waited for."""


class ReasoningBudget:
    """The reasoning of one sequence, followed token by token.

    Attributes:
        is_over: the reasoning has ended, or there is none.
        next_token: the token that must come next; None: any may come.
    """

    def __init__(self, sampling: SamplingParams, output: TokenIds, symbols_of: SymbolsOf) -> None:
        """
        Args:
            sampling: with ``max_reasoning_tokens`` and the tokens around the reasoning.
            output: the tokens generated before a retraction, a takeover or a rollback.
            symbols_of: of the vocabulary.
        """
        assert sampling.max_reasoning_tokens is not None
        self._most = sampling.max_reasoning_tokens
        self._symbols_of = symbols_of
        opening, self._closing = (
            sampling.reasoning_opening_ids,
            list(sampling.reasoning_closing_ids),
        )
        self._num_opening = len(opening)
        self._opening = TagFinder(tag_symbols(opening, symbols_of)) if opening else None
        """None once the answer is inside the reasoning."""
        self._end = TagFinder(tag_symbols(self._closing, symbols_of))
        self._count = 0
        self._tail: list[int] = []
        """The last tokens of the reasoning, as many as the closing tag has."""
        self.is_over = False
        self.next_token: int | None = None
        self.advance(output.tolist())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow the tokens that were taken."""
        for token in token_ids:
            if self.is_over:
                break
            self._count += 1
            symbols = self._symbols_of(token)
            if self._opening is None:
                self._tail = [*self._tail, token][-len(self._closing) :]
            elif (used := self._opening.push(symbols)) is not None:
                self._opening, symbols = None, symbols[used:]
            else:
                late = self._count >= self._num_opening + _BEFORE_OPENING
                self.is_over = late and not self._opening.matched
                continue
            self.is_over = self._end.push(symbols) is not None
        self.next_token = self._forced()

    def fork(self) -> "ReasoningBudget":
        """The same, to be followed along a draft."""
        fork = copy.copy(self)
        fork._opening, fork._end = copy.copy(self._opening), copy.copy(self._end)
        return fork

    def _forced(self) -> int | None:
        if self.is_over or self._opening is not None:
            return None
        closing = self._closing
        longest = min(len(closing) - 1, len(self._tail))
        begun = next((n for n in range(longest, 0, -1) if self._tail[-n:] == closing[:n]), 0)
        return closing[begun] if self._count + len(closing) - begun >= self._most else None
