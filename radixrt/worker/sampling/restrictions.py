"""Restricts the next token of one sequence, by rows of the bitmask: to allowed tokens, away from
forbidden paths, to the end of its reasoning."""

import copy
from collections.abc import Iterable, Sequence

import numpy as np

from radixrt.base.sampling_params import SamplingParams
from radixrt.base.tags import SymbolsOf, TagFinder, tag_symbols
from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.matcher import Matcher
from radixrt.messages.ids import TokenIds

LONGEST_SEARCH = 64
"""Tokens at the end of a path that are searched for an alternative; each costs one mask."""

Path = tuple[int, ...]

ALL_TOKENS = -1
"""A word of the bitmask with every bit set."""


class ForbiddenPaths:
    """The forbidden paths of one sequence, followed from the point where they begin."""

    def __init__(self, matcher: Matcher, paths: Sequence[Sequence[int]], num_words: int) -> None:
        """
        Args:
            matcher: at the point where the paths begin; forked, not changed.
            paths: token sequences, each allowed by the matcher.
        """
        self._banned: dict[Path, set[int]] = {}
        self._longest = 0
        self._since: list[int] = []
        for path in paths:
            self._ban(matcher.fork(), tuple(path), num_words)

    def _ban(self, matcher: Matcher, path: Path, num_words: int) -> None:
        first = max(0, len(path) - LONGEST_SEARCH)
        if matcher.advance(path[:first]) < first:
            return
        rows = np.empty((len(path) - first, num_words), dtype=np.int32)
        for row, token in zip(rows, path[first:], strict=True):
            matcher.fill_mask(row)
            matcher.advance([token])
        for end in range(len(path), first, -1):
            before, token = path[: end - 1], path[end - 1]
            others = rows[end - 1 - first]
            forbid(others, {token, *self._banned.get(before, ())})
            if others.any():
                self._banned.setdefault(before, set()).add(token)
                self._longest = max(self._longest, end)
                return

    def fork(self) -> "ForbiddenPaths":
        """The same paths, followed to the same point."""
        fork = copy.copy(self)
        fork._since = self._since.copy()
        return fork

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow the paths by the tokens that were taken."""
        if len(self._since) < self._longest:
            self._since += token_ids

    def forbid(self, row: BitmaskRow) -> None:
        """Remove the tokens that are forbidden now from a row of the bitmask."""
        if len(self._since) < self._longest:
            forbid(row, self._banned.get(tuple(self._since), ()))


def forbid(row: BitmaskRow, token_ids: Sequence[int] | set[int]) -> None:
    """Remove tokens from a row of the bitmask."""
    words = row.view(np.uint32)
    for token in token_ids:
        words[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << (token % 32)))


def allow_only(row: BitmaskRow, token_id: int) -> None:
    """Remove all tokens except one from a row of the bitmask."""
    row.fill(0)
    row.view(np.uint32)[token_id // 32] = np.uint32(1 << (token_id % 32))


def allow(row: BitmaskRow, token_id: int) -> None:
    """Add a token to a row of the bitmask."""
    row.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))


class TokenRestriction:
    """The restriction of one sequence, followed along its answer. The tokens of the prompt do not
    count."""

    def __init__(
        self,
        sampling: SamplingParams,
        output: TokenIds,
        num_words: int,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        """
        Args:
            sampling: with ``allowed_token_ids`` or ``bad_words_token_ids``.
            output: the tokens generated before a retraction.
            end_token_ids: allowed beside ``allowed_token_ids``: of a sequence whose grammar rules
                its end.
        """
        self.failed = False
        """No token is left."""
        self._always = np.full(num_words, ALL_TOKENS, dtype=np.int32)
        """The tokens that are allowed at any point, as a row of the bitmask."""
        if sampling.allowed_token_ids is not None:
            self._always = _row_of({*sampling.allowed_token_ids, *end_token_ids}, num_words)
        self._last: dict[tuple[int, ...], list[int]] = {}
        """The last token of each forbidden sequence, by the tokens before it."""
        for *before, last in sampling.bad_words_token_ids:
            self._last.setdefault(tuple(before), []).append(last)
        forbid(self._always, self._last.pop((), []))
        self._lengths = sorted({len(before) for before in self._last})
        self._tail: list[int] = []
        self.advance(output.tolist())

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow the tokens that were taken."""
        if self._lengths:
            self._tail = [*self._tail, *token_ids][-self._lengths[-1] :]

    def apply(self, row: BitmaskRow) -> None:
        """Remove the tokens that may not come next from a row of the bitmask."""
        row &= self._always
        for length in self._lengths:
            if length > len(self._tail):
                break
            forbid(row, self._last.get(tuple(self._tail[-length:]), ()))


def _row_of(token_ids: Iterable[int], num_words: int) -> BitmaskRow:
    """A row of the bitmask that allows these tokens alone."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[np.fromiter(token_ids, dtype=np.int64)] = 1
    row: BitmaskRow = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
    return row


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
