"""Which tokens must not come again after a point of return?"""

from collections.abc import Callable, Sequence

from radixrt.constrained.parting import FailedSpan, Parting

LONGEST_PATH = 256
"""Longer ones are forgotten: what they forbid would be found wrong again."""


class Exclusions:
    """Paths of tokens that failed, for as long as the tokens before them may stand.

    Each is kept from an anchor on, a number of output tokens; the answer's tokens before the anchor are those
    that stood there when the path failed.
    """

    def __init__(self, tokens_along: Callable[[str], Sequence[int]] | None) -> None:
        self._tokens_along = tokens_along
        self._paths: set[tuple[int, tuple[int, ...]]] = set()

    def add(self, anchor: int, failed: FailedSpan, parting: Parting) -> None:
        """Forbid the failed path at each depth of ``parting``, however it is spelled in tokens."""
        for depth in parting.depths:
            before = tuple(failed.token_ids[:depth])
            rest = failed.text[failed.token_starts[depth] :]
            texts = [rest, *parting.others] if depth == parting.depths[0] else [rest]
            spellings = {failed.token_ids[depth]}
            if self._tokens_along is not None:
                spellings.update(*(self._tokens_along(text) for text in texts if text))
            self._paths.update((anchor + depth, (token,)) for token in spellings if not before)
            self._paths.update((anchor, (*before, token)) for token in spellings if before)

    def move_before(self, kept: int, tokens: list[int]) -> None:
        """Tokens from ``kept`` on may change: write them into the paths that begin behind."""
        moved = set()
        for anchor, path in self._paths:
            if anchor > kept:
                anchor, path = kept, (*tokens[kept:anchor], *path)
            if len(path) <= LONGEST_PATH:
                moved.add((anchor, path))
        self._paths = moved

    def after(self, tokens: list[int]) -> list[list[int]]:
        """The paths that may still come after ``tokens``, from there on."""
        kept = len(tokens)
        return sorted(
            list(path[kept - anchor :])
            for anchor, path in self._paths
            if len(path) > kept - anchor and tuple(tokens[anchor:]) == path[: kept - anchor]
        )

    def came_anyway(self, tokens: list[int]) -> set[int]:
        """Positions of tokens that were forbidden and came: the grammar allowed no other there."""
        return {
            anchor + len(path) - 1
            for anchor, path in self._paths
            if tuple(tokens[anchor : anchor + len(path)]) == path
        }
