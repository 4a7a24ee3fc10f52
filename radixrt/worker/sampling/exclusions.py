"""Bans the token paths on which an answer has failed a check before.

An answer that a check found invalid is cut back to an earlier point and goes on from there without the failed path.
Banning the last token of that path would do nothing where the grammar allows no other, so each path is cut back to the
last point at which another token is possible.
"""

from collections.abc import Sequence

import numpy as np

from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.matcher import Matcher

LONGEST_SEARCH = 64
"""Tokens before the end of a path at which another token is searched for; each costs one mask."""

Path = tuple[int, ...]


class Exclusions:
    """The banned paths of one sequence, which goes on from the point where they begin."""

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

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that the sequence has got."""
        if len(self._since) < self._longest:
            self._since += token_ids

    def forbid(self, row: BitmaskRow) -> None:
        """Remove the tokens that are banned now from a row of the bitmask."""
        if len(self._since) < self._longest:
            forbid(row, self._banned.get(tuple(self._since), ()))


def forbid(row: BitmaskRow, token_ids: Sequence[int] | set[int]) -> None:
    """Remove tokens from a row of the bitmask."""
    words = row.view(np.uint32)
    for token in token_ids:
        words[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << (token % 32)))


def allow_only(row: BitmaskRow, token_id: int) -> None:
    """Remove all tokens but one from a row of the bitmask."""
    row.fill(0)
    row.view(np.uint32)[token_id // 32] = np.uint32(1 << (token_id % 32))
