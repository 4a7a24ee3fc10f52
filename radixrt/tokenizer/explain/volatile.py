"""Tells whether two texts differ only in a date, a time, a number or a hash."""

import re
from typing import NamedTuple

from radixrt.base.common_prefix import common_prefix_length

_WORD = r"[\w:.+/-]"

_NAMED = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)[a-z]*"
"""Months and days."""

_VOLATILE = re.compile(rf"{_WORD}*\d{_WORD}*|\b{_NAMED}\b", re.IGNORECASE)

_BEFORE = re.compile(rf"{_WORD}*\Z")
_AFTER = re.compile(rf"{_WORD}*")

_KINDS = {
    "a UUID": re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}", re.IGNORECASE),
    "a date": re.compile(
        rf"\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|{_NAMED}", re.IGNORECASE
    ),
    "a time": re.compile(r"\d\d?:\d\d"),
    "a number": re.compile(r"[+-]?\d+([.,/]\d+)*%?"),
}
"""What a volatile word is called: the first that describes it; else it is a hash or an id."""


class Volatile(NamedTuple):
    """Volatile text at the place where two texts begin to differ."""

    kind: str
    word: str
    """In the first text."""
    agreeing: int
    """Number of characters behind it in the first text that agree with the second text, but for further volatile words."""


def volatile_at_divergence(one: str, other: str) -> Volatile | None:
    """The volatile text in which two texts begin to differ, if they do in one.

    >>> volatile_at_divergence("It is 10:42. Be brief.", "It is 9:07. Be brief.")
    Volatile(kind='a time', word='10:42', agreeing=11)
    """
    at = common_prefix_length(one, other)
    if at in (len(one), len(other)):
        return None
    before = _BEFORE.search(one, 0, at)
    assert before is not None
    ends = [_AFTER.match(text, at) for text in (one, other)]
    words = [text[before.start() : end.end()] for text, end in zip((one, other), ends, strict=True) if end]  # fmt: skip
    if not all(map(_is_volatile, words)):
        return None
    rests = [text[end.end() :] for text, end in zip((one, other), ends, strict=True) if end]
    return Volatile(_kind(words[0]), words[0], _num_agreeing(*rests))


def _is_volatile(word: str) -> bool:
    return _VOLATILE.fullmatch(word.strip(".:/+-")) is not None


def _kind(word: str) -> str:
    word = word.strip(".:/+-")
    for kind in ("a UUID", "a date", "a time"):
        if _KINDS[kind].search(word):
            return kind
    return "a number" if _KINDS["a number"].fullmatch(word) else "a hash or an id"


def _num_agreeing(one: str, other: str) -> int:
    """Number of leading characters of ``one`` that agree with ``other``, volatile words apart."""
    mine, theirs = _parts(one), _parts(other)
    agreeing = 0
    for (text, word), (text_there, _) in zip(mine, theirs, strict=False):
        if text != text_there:
            return agreeing + common_prefix_length(text, text_there)
        agreeing += len(text) + len(word)
    return agreeing


def _parts(text: str) -> list[tuple[str, str]]:
    """The text, cut behind each volatile word: what is before the word, and the word."""
    parts, position = [], 0
    for match in _VOLATILE.finditer(text):
        parts.append((text[position : match.start()], match.group()))
        position = match.end()
    return [*parts, (text[position:], "")]
