"""Finds the places of a text that agree longest with the end of another, by an index of its pairs
of tokens.

It is the match search of LZ77 compressors: a table gives the last place of each pair, a chain leads
to the places before it, and of the last few the longest match is taken. Where no pair agrees, a
second table gives the place of a single token. Taking a token costs two entries, whatever the
length of the text.
"""

from collections.abc import Sequence
from typing import NamedTuple

LONGEST_MATCH = 32
"""Tokens that are compared at most."""

CANDIDATES = 8
"""Places that are compared at most: the last ones."""

SEPARATOR = -1
"""Stands between two texts. No match goes beyond it."""

ONCE, AGAIN, DIFFERENTLY = range(3)
"""How a token was followed: it occurred once before, or was followed by the same token the last two
times, or by another one."""

_NOWHERE = 0
"""A place without a pair before it."""


class SuffixMatch(NamedTuple):
    """A place of the text, and the number of tokens before it that agree with the end of the other
    text."""

    place: int
    length: int
    followed: int = ONCE
    """Whether the same token followed before, if a single token agrees."""

    @property
    def kind(self) -> int:
        """Matches of a kind are right about as often: the magnitude of the length; of a single
        token, how it was followed."""
        return self.followed if self.length == 1 else self.length.bit_length() + DIFFERENTLY


class SuffixIndex:
    """An index of a text that may grow.

    >>> text = [5, 1, 2, 3, 9, 1, 2, 3, 7, 1, 2]
    >>> SuffixIndex(text).find(text)
    SuffixMatch(place=7, length=2, followed=0)
    >>> SuffixIndex(text).find([5, 1, 2])
    SuffixMatch(place=3, length=3, followed=0)
    >>> SuffixIndex(text).find([2, 9])
    SuffixMatch(place=5, length=1, followed=0)
    >>> SuffixIndex(text).find([2, 8]) is None
    True

    Args:
        text: kept and not copied; tokens may be appended to it.
        start: tokens at its beginning that are not indexed.
    """

    def __init__(self, text: list[int], start: int = 0) -> None:
        self.text = text
        self._last: dict[int, int] = {}
        """The place behind the last occurrence of a pair, by pair."""
        self._previous = [_NOWHERE] * start
        """The place behind the occurrence before of the same pair, or _NOWHERE, by place."""
        self._single: dict[int, int] = {}
        """The place behind the last occurrence of a token times 4, plus how it was followed, by
        token."""

    def find(self, ending: Sequence[int]) -> SuffixMatch | None:
        """The place where the text goes on after the end of ``ending``: of the last places whose
        pair agrees, the one that agrees longest, and the last of these. If no pair agrees, the last
        place behind the last token. None: it does not occur."""
        self.catch_up()
        if len(ending) < 2:
            return None
        place = self._last.get(_pair(ending[-2], ending[-1]), _NOWHERE)
        if place == _NOWHERE:
            single = self._single.get(ending[-1])
            return None if single is None else SuffixMatch(single >> 2, 1, single & 3)
        best, longest = None, 1
        for _ in range(CANDIDATES):
            if place == _NOWHERE or longest == LONGEST_MATCH:
                break
            if (length := self._agreeing(place, ending, longest)) > longest:
                best, longest = SuffixMatch(place, length), length
            place = self._previous[place]
        return best

    def _agreeing(self, place: int, ending: Sequence[int], more_than: int) -> int:
        """Number of tokens before a place that agree with the end; 0 if they are not more than
        ``more_than``."""
        text = self.text
        most = min(place, len(ending), LONGEST_MATCH)
        if more_than >= most or text[place - 1 - more_than] != ending[-1 - more_than]:
            return 0
        length = 2
        while length < most and text[place - 1 - length] == ending[-1 - length]:
            length += 1
        return length

    def catch_up(self) -> None:
        """Index the tokens that the text has got; :meth:`find` does it too. The pair at its end has
        no place behind it yet."""
        text, previous, last, single = self.text, self._previous, self._last, self._single
        for place in range(len(previous), len(text)):
            if place < 2:
                previous.append(_NOWHERE)
                continue
            token = text[place - 1]
            pair = _pair(text[place - 2], token)
            previous.append(last.get(pair, _NOWHERE))
            last[pair] = place
            followed = ONCE
            if (before := single.get(token)) is not None:
                followed = AGAIN if text[before >> 2] == text[place] else DIFFERENTLY
            single[token] = place << 2 | followed


def ending_of(text: Sequence[int], ahead: Sequence[int]) -> Sequence[int]:
    """The end of a text with draft tokens behind it, as far as :meth:`SuffixIndex.find` reads
    it."""
    return [*text[-LONGEST_MATCH:], *ahead] if ahead else text


def _pair(first: int, second: int) -> int:
    return first << 32 | (second & 0xFFFFFFFF)
