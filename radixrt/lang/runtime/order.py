"""Orders waiting prompts so that those with long common prefixes follow one another.

The order is a walk along nearest neighbours: it begins with the two prompts that share the longest
prefix, and goes on with the prompt that shares most with the last one.
"""

import bisect
from dataclasses import dataclass, field

from radixrt.base.common_prefix import common_prefix_length
from radixrt.lang.backends.protocol import Prompt


@dataclass
class PrefixOrder:
    """Prompts that wait, each under a key."""

    _waiting: list[tuple[str, int, str]] = field(default_factory=list)
    """Prompt, number and key; sorted, so that neighbours share the longest prefixes."""
    _last: str | None = None
    _num_added: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prompt: str, key: str) -> None:
        bisect.insort(self._waiting, (prompt, self._num_added, key))
        self._num_added += 1

    def remove(self, key: str) -> None:
        """Drop a key; an unknown one is ignored."""
        self._waiting = [entry for entry in self._waiting if entry[2] != key]

    def peek(self) -> str:
        """The key that :meth:`pop` would take.

        Raises:
            IndexError: no prompt waits.
        """
        return self._waiting[self._next()][2]

    def pop(self) -> str:
        """Take the key of the next prompt.

        Raises:
            IndexError: no prompt waits.
        """
        self._last, _, key = self._waiting.pop(self._next())
        return key

    def _next(self) -> int:
        if self._last is None:
            return self._start()
        after = bisect.bisect_left(self._waiting, (self._last,))
        if after in (0, len(self._waiting)):
            return min(after, len(self._waiting) - 1)
        following = common_prefix_length(self._last, self._waiting[after][0])
        preceding = common_prefix_length(self._last, self._waiting[after - 1][0])
        return after if following >= preceding else after - 1

    def _start(self) -> int:
        """The first of the two neighbours that share the longest prefix."""
        shared = [
            common_prefix_length(one[0], other[0])
            for one, other in zip(self._waiting, self._waiting[1:], strict=False)
        ]
        return shared.index(max(shared)) if shared else 0


def as_text(prompt: Prompt) -> str:
    """A text for comparisons: prompts that begin alike have texts that begin alike."""
    if isinstance(prompt, str):
        return prompt
    return "".join(f"\0{message['role']}\0{message['content']}" for message in prompt)
