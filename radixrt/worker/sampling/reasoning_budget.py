"""Ends the reasoning of a sequence when it has used its tokens, by forcing the tokens that close it."""

from collections.abc import Sequence

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import TokenIds

_BEFORE_OPENING = 4
"""Tokens of white space, at most, that an answer may have before it opens its reasoning."""


class ReasoningBudget:
    """The reasoning of one sequence, followed token by token.

    Attributes:
        is_over: the reasoning has ended, or there is none.
        next_token: the token that must come next; None: any may come.
    """

    def __init__(self, sampling: SamplingParams, output: TokenIds) -> None:
        """
        Args:
            sampling: with ``max_reasoning_tokens`` and the tokens around the reasoning.
            output: the tokens generated before a retraction, a takeover or a rollback.
        """
        assert sampling.max_reasoning_tokens is not None
        self._most = sampling.max_reasoning_tokens
        self._opening = list(sampling.reasoning_opening_ids)
        """Empty once the answer is inside the reasoning."""
        self._closing = list(sampling.reasoning_closing_ids)
        self._count = 0
        self._tail: list[int] = []
        """The last tokens, as many as the next mark has."""
        self.is_over = False
        self.next_token: int | None = None
        self.advance(output.tolist())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow the tokens that were taken."""
        for token in token_ids:
            if self.is_over:
                break
            self._count += 1
            mark = self._opening or self._closing
            self._tail = [*self._tail, token][-len(mark) :]
            if self._tail == mark:
                self.is_over = not self._opening
                self._opening, self._tail = [], []
            elif self._opening:
                self.is_over = self._count >= len(mark) + _BEFORE_OPENING
        self.next_token = self._forced()

    def _forced(self) -> int | None:
        if self.is_over or self._opening:
            return None
        closing = self._closing
        longest = min(len(closing) - 1, len(self._tail))
        begun = next((n for n in range(longest, 0, -1) if self._tail[-n:] == closing[:n]), 0)
        return closing[begun] if self._count + len(closing) - begun >= self._most else None
