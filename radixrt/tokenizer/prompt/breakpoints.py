"""Finds the number of leading tokens of a prompt that a cache breakpoint covers.

A cache breakpoint names a message, but retention needs a number of tokens. A template need not
render the first messages of a chat as it renders them within the whole: it may leave out old
reasoning, or put the tools before the last question. So the first messages are rendered by
themselves, and the common prefix with the prompt is kept.
"""

import functools
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from radixrt.base.common_prefix import common_prefix_length
from radixrt.base.errors import RequestError

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
        self._longest_first = sorted(strings, key=len, reverse=True)
        self._longest = len(self._longest_first[0])
        self._window_chars = window_chars

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Made for the first text: with Gemma's 6,249 control tokens, that takes a tenth of a
        second."""
        return re.compile("|".join(map(re.escape, self._longest_first)))

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


Messages = list[dict[str, Any]]

_STAND_IN = {"role": "user", "content": f"\ue000{secrets.token_hex(8)}\ue001"}
"""A message that begins like no other."""


def agreed_length(
    render: Callable[[Messages], str], text: str, messages: Messages, message: int
) -> int:
    """Number of leading characters of a rendered chat that are settled by its messages up to one of
    them.

    Args:
        render: renders other messages with the same tools.
        text: all messages, rendered.
        message: index of the last message that counts; -1: the tools and leading system messages
            count.

    Returns:
        0 where the template refuses to render the beginning.
    """
    if message < 0:
        beginning = [*_leading_system(messages), _STAND_IN]
    elif message >= len(messages):
        return 0
    else:
        beginning = messages[: message + 1]
    try:
        return common_prefix_length(render(beginning), text)
    except RequestError:  # breakpoints are advice: the request is still answered
        return 0


def substitute(
    pattern: re.Pattern[str] | Literals,
    replacement: Callable[[re.Match[str]], str],
    text: str,
    lengths: Sequence[int],
) -> tuple[str, list[int]]:
    """The text with the replacements of all matches, and the lengths of some prefixes of the text
    after it. A prefix that ends inside a match ends before it."""
    pieces: list[str] = []
    new_lengths = list(lengths)
    copied = new_length = 0
    for match in pattern.finditer(text):
        pieces += (text[copied : match.start()], replacement(match))
        start = new_length + match.start() - copied
        copied, new_length = match.end(), start + len(pieces[-1])
        for number, length in enumerate(lengths):
            if length >= match.end():
                new_lengths[number] = new_length + length - match.end()
            elif length > match.start():
                new_lengths[number] = start
    return "".join([*pieces, text[copied:]]) if pieces else text, new_lengths


def num_tokens_within(ends: Sequence[int], length: int) -> int:
    """Number of leading tokens within the first ``length`` characters of a text.

    >>> num_tokens_within([4, 7, 12], 8)
    2

    Args:
        ends: where in the text each token ends, in characters, ascending.
    """
    return bisect_right(ends, length)


def _leading_system(messages: Messages) -> Messages:
    leading: Messages = []
    for message in messages:
        if message.get("role") != "system":
            break
        leading.append(message)
    return leading
