"""Forbids the token paths on which an answer has failed before.

An answer that a check found invalid is taken back and goes on from an earlier point with the failed
path excluded. Forbidding the last token of that path has no effect where the grammar leaves no
other token, so each path is cut back to its last token that has an alternative.
"""

import copy
from collections.abc import Sequence

import numpy as np

from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.matcher import Matcher

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
            num_words: of a row of the bitmask.
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
