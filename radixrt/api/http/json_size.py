"""Counts the values of a JSON text without parsing it. Run as a program, it counts those of its
standard input.

Imports the standard library alone, so that a process that counts starts in some 10 ms. It yields to
those that compute answers.
"""

import os
import re
from collections.abc import Callable
from typing import NamedTuple

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or one that does not end. It matches at every quote: if that of a string without an end
did not, each quote in it would be tried anew up to the end of the text.
"""

NICENESS = 5


class JsonSize(NamedTuple):
    """Numbers of a JSON text's parts."""

    containers: int
    """Arrays and objects."""
    members: int
    """Keys of objects."""
    values: int
    """Strings, numbers, arrays, objects, ...: upper bound."""

    def exceeds(self, limit: "JsonSize") -> bool:
        """Whether one of the numbers is over that of the limit."""
        return any(number > most for number, most in zip(self, limit, strict=True))


def upper_bound(text: bytes, count: Callable[[bytes], int] | None = None) -> JsonSize:
    """Count brackets, colons and commas, in strings too: a bound from above.

    >>> upper_bound(b'{"a": [1, 2], "b": "[{,:"}')
    JsonSize(containers=4, members=3, values=8)

    Args:
        count: of a character in the text, if there is a faster one than that of ``bytes``.
    """
    count = count or text.count
    containers = count(b"[") + count(b"{")
    return JsonSize(containers, count(b":"), containers + count(b",") + 1)


def exact_size(text: bytes) -> JsonSize:
    """Count outside of strings. One that does not end is as long as the text, which its parser
    refuses at that string.

    >>> exact_size(b'{"a": [1, 2], "b": "[{,:"}')
    JsonSize(containers=2, members=2, values=5)
    """
    return upper_bound(_STRING.sub(b"", text))


if __name__ == "__main__":
    import sys

    os.nice(NICENESS)
    print(*exact_size(sys.stdin.buffer.read()))
