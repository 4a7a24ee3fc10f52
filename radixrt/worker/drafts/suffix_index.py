"""Finds the places of a text that agree longest with the end of another, by an index of its pairs of tokens.

It is the match search of LZ77 compressors: a table gives the last place of each pair, a chain leads to the places before
it, and of the last few the longest match is taken. Taking a token costs one entry, whatever the length of the text.
"""

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_MATCH = 32
"""Tokens that are compared at most."""

CANDIDATES = 16
"""Places that are compared at most: the last ones."""

SEPARATOR = -1
"""Stands between two texts. No match goes beyond it."""

_NOWHERE = 0
"""A place without a pair before it."""


class SuffixMatch(NamedTuple):
    """A place of the text, and the number of tokens before it that agree with the end of the other text."""

    place: int
    length: int


class SuffixIndex:
    """An index of a text that may grow.

    >>> text = [5, 1, 2, 3, 9, 1, 2, 3, 7, 1, 2]
    >>> SuffixIndex(text).find(text)
    SuffixMatch(place=7, length=2)
    >>> SuffixIndex(text).find([5, 1, 2])
    SuffixMatch(place=3, length=3)
    >>> SuffixIndex(text).find([2, 1]) is None
    True

    Args:
        text: kept and not copied; tokens may be appended to it.
        start: tokens at its beginning that are not indexed.
    """

    def __init__(self, text: list[int], start: int = 0) -> None:
        self.text = text
        self._last: dict[int, int] = {}
        """By pair: the place behind its last occurrence."""
        self._previous = [_NOWHERE] * start
        """By place: the place behind the occurrence before it of the same pair, or _NOWHERE."""

    def find(self, ending: Sequence[int]) -> SuffixMatch | None:
        """The place where the text goes on after the end of ``ending``: of the last places whose pair agrees, the one that
        agrees longest, and the last of these. None: no place agrees in two tokens."""
        self._catch_up()
        if len(ending) < 2:
            return None
        place = self._last.get(_pair(ending[-2], ending[-1]), _NOWHERE)
        best, longest = None, 1
        for _ in range(CANDIDATES):
            if place == _NOWHERE or longest == LONGEST_MATCH:
                break
            if (length := self._agreeing(place, ending, longest)) > longest:
                best, longest = SuffixMatch(place, length), length
            place = self._previous[place]
        return best

    def _agreeing(self, place: int, ending: Sequence[int], more_than: int) -> int:
        """Number of tokens before a place that agree with the end; 0 if they are not more than ``more_than``."""
        text = self.text
        most = min(place, len(ending), LONGEST_MATCH)
        if more_than >= most or text[place - 1 - more_than] != ending[-1 - more_than]:
            return 0
        length = 2
        while length < most and text[place - 1 - length] == ending[-1 - length]:
            length += 1
        return length

    def _catch_up(self) -> None:
        """Index the tokens that the text has got. The pair at its end has no place behind it yet."""
        text, previous, last = self.text, self._previous, self._last
        for place in range(len(previous), len(text)):
            if place < 2:
                previous.append(_NOWHERE)
                continue
            pair = _pair(text[place - 2], text[place - 1])
            previous.append(last.get(pair, _NOWHERE))
            last[pair] = place


def _pair(first: int, second: int) -> int:
    return first << 32 | (second & 0xFFFFFFFF)
