"""Which tokens must not come again after a point of return?"""

from collections.abc import Callable, Iterator, Sequence

from radixrt.constrained.parting import FailedSpan, Parting

TokensAlong = Callable[[str], Sequence[tuple[int, int]]]
"""See :meth:`radixrt.constrained.token_texts.TokenTexts.along`."""
MOST_SPELLINGS = 16
"""Of the characters before a culprit that share a token with it: they are few."""
LONGEST_PATH = 256
"""Longer ones are forgotten: what they forbid would be found wrong again."""


class Exclusions:
    """Paths of tokens that failed, for as long as the tokens before them may stand.

    Each is kept from an anchor on, a number of output tokens; the answer's tokens before the anchor are those
    that stood there when the path failed.
    """

    def __init__(self, tokens_along: TokensAlong | None) -> None:
        self._tokens_along = tokens_along
        self._paths: set[tuple[int, tuple[int, ...]]] = set()

    def add(self, anchor: int, failed: FailedSpan, parting: Parting) -> None:
        """Forbid the failed path at each depth of ``parting``, however it is spelled in tokens."""
        for depth in parting.depths:
            rest = failed.text[failed.token_starts[depth] :]
            first = depth == parting.depths[0]
            spellings: set[tuple[int, ...]] = set()
            if not (first and parting.lead):
                spellings.add((failed.token_ids[depth],))
            spellings.update(self._spellings(rest, parting.lead if first else 0))
            spellings = spellings or {(failed.token_ids[depth],)}
            before = tuple(failed.token_ids[parting.depths[0] : depth])
            self._paths.update(
                (anchor + parting.depths[0], before + spelling) for spelling in spellings
            )

    def once(self, parting: Parting) -> list[list[int]]:
        """What is to be forbidden for the very next attempt only, from the first of the depths on."""
        return [
            list(spelling)
            for text in parting.others
            for spelling in self._spellings(text, parting.lead)
        ]

    def _spellings(self, text: str, lead: int) -> Iterator[tuple[int, ...]]:
        """Tokens along ``text`` up to the first one that reaches beyond its first ``lead`` characters."""
        if self._tokens_along is None:
            return
        todo: list[tuple[tuple[int, ...], int]] = [((), 0)]
        for _ in range(MOST_SPELLINGS):
            if not todo:
                return
            path, at = todo.pop()
            for token, length in self._tokens_along(text[at:]):
                if at + length > lead:
                    yield (*path, token)
                elif at + length < len(text):
                    todo.append(((*path, token), at + length))

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
