"""Finds strings such as special tokens in long texts, without holding Python's lock for long.

A regular expression holds the lock for the whole of a search: up to 0.2 s for a megabyte that begins like a special token
again and again. Tokens of running answers wait meanwhile.
"""

import re
from collections.abc import Iterable, Iterator

WINDOW_CHARS = 1 << 15
"""Searched at a time; at most some milliseconds."""


class Literals:
    """Finds any of some strings; where several begin, the longest.

    >>> [match.group() for match in Literals(["<a>", "<ab>"]).finditer("x<ab><a>")]
    ['<ab>', '<a>']
    """

    def __init__(self, strings: Iterable[str], window_chars: int = WINDOW_CHARS) -> None:
        """
        Args:
            strings: at least one; none is empty.
        """
        longest_first = sorted(strings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._longest = len(longest_first[0])
        self._window_chars = window_chars

    def finditer(self, text: str) -> Iterator[re.Match[str]]:
        """The matches, in order; none overlaps another."""
        start = 0
        while start < len(text):
            window_end = start + self._window_chars
            while match := self._pattern.search(text, start, window_end + self._longest):
                if match.start() >= window_end:
                    break
                yield match
                start = match.end()
            start = max(start, window_end)
