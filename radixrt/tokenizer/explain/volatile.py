"""Tells whether two texts differ only in a date, a time, a number or a hash."""

import re
from typing import NamedTuple

from radixrt.base.common_prefix import common_prefix_length

_WORD = re.compile(r"[\w:.+/-]+")
_PUNCTUATION = ".:/+-"

_NAMED = re.compile(
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)[a-z]{0,6}",
    re.IGNORECASE,
)
"""Months and days."""

_KINDS = {
    "a UUID": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}", re.IGNORECASE),
    "a date": re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}"),
    "a time": re.compile(r"\d\d?:\d\d"),
    "a number": re.compile(r"[+-]?\d+(?:[.,/]\d+)*\Z"),
}
"""What a volatile word is called: the first whose pattern it begins with; else it is a hash or an
id."""


class Volatile(NamedTuple):
    """Volatile text at the place where two texts begin to differ."""

    kind: str
    word: str
    """The word in the first text."""
    agreeing: int
    """Number of characters behind it in the first text that agree with the second text, but for
    further volatile words."""
    end: int
    """The place in the first text where they end."""


def volatile_at_divergence(one: str, other: str) -> Volatile | None:
    """The volatile text in which two texts begin to differ, if they do in one.

    >>> volatile_at_divergence("It is 10:42 now. Be brief.", "It is 9:07 now. Be brief.")
    Volatile(kind='a time', word='10:42', agreeing=15, end=26)
    """
    at = common_prefix_length(one, other)
    if at in (len(one), len(other)):
        return None
    start = at
    while start > 0 and _WORD.match(one, start - 1, start):
        start -= 1
    words = [_word_at(text, start) for text in (one, other)]
    if not all(map(_is_volatile, words)):
        return None
    end = start + len(words[0])
    agreeing = _num_agreeing(one[end:], other[start + len(words[1]) :])
    word = words[0].strip(_PUNCTUATION)
    return Volatile(_kind(word), word, agreeing, end + agreeing)


def _word_at(text: str, start: int) -> str:
    found = _WORD.match(text, start)
    return found.group() if found else ""


def _is_volatile(word: str) -> bool:
    return any(map(str.isdigit, word)) or _NAMED.fullmatch(word.strip(_PUNCTUATION)) is not None


def _kind(word: str) -> str:
    if _NAMED.fullmatch(word):
        return "a date"
    found = (kind for kind, pattern in _KINDS.items() if pattern.match(word))
    return next(found, "a hash or an id")


def _num_agreeing(one: str, other: str) -> int:
    """Number of leading characters of ``one`` that agree with ``other``, volatile words apart."""
    agreeing = 0
    for (text, word), (text_there, _) in zip(_parts(one), _parts(other), strict=False):
        if text != text_there:
            return agreeing + common_prefix_length(text, text_there)
        agreeing += len(text) + len(word)
    return agreeing


def _parts(text: str) -> list[tuple[str, str]]:
    """The text, cut behind each volatile word: what is before the word, and the word."""
    parts, position = [], 0
    for match in _WORD.finditer(text):
        if _is_volatile(match.group()):
            parts.append((text[position : match.start()], match.group()))
            position = match.end()
    return [*parts, (text[position:], "")]
