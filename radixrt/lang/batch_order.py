"""In which order do the runs of a batch begin? Those with the most in common one after another.

Each program runs until it has a first call to send; then it waits here. What it would send is known by then, so no
program is run twice, and nothing has to be guessed. The order is a walk along the nearest neighbours: it begins with
the two prompts that share the longest prefix, and goes on with whichever shares most with the last one.
"""

import bisect

from radixrt.base.common_prefix import common_prefix_length


class PrefixOrder:
    """Prompts that wait, each under a key; :meth:`next_key` takes the one that should go next."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, int, str]] = []
        """Sorted: the neighbours of a prompt share the longest prefix with it."""
        self._last: str | None = None
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prompt: str, key: str) -> None:
        bisect.insort(self._waiting, (prompt, self._num_added, key))
        self._num_added += 1

    def remove(self, key: str) -> None:
        """Whoever waited for it has gone; an unknown key is ignored."""
        self._waiting = [entry for entry in self._waiting if entry[2] != key]

    def peek(self) -> str:
        """The key that :meth:`next_key` would take: its prompt shares most with the last one taken.

        Raises:
            IndexError: none waits.
        """
        return self._waiting[self._next_place()][2]

    def next_key(self) -> str:
        """Take the key of the next prompt.

        Raises:
            IndexError: none waits.
        """
        self._last, _, key = self._waiting.pop(self._next_place())
        return key

    def nearest(self, prompt: str) -> tuple[str, int] | None:
        """The key of the waiting prompt that shares most with this one, and how many characters; None: none waits."""
        if not self._waiting:
            return None
        other, _, key = self._waiting[self._nearest(prompt)]
        return key, common_prefix_length(prompt, other)

    def _next_place(self) -> int:
        return self._start() if self._last is None else self._nearest(self._last)

    def _nearest(self, prompt: str) -> int:
        """The place of the prompt with the longest prefix in common; of two such, the later one."""
        after = bisect.bisect_left(self._waiting, (prompt,))
        if after == len(self._waiting):
            return after - 1
        if after == 0:
            return 0
        following = common_prefix_length(prompt, self._waiting[after][0])
        preceding = common_prefix_length(prompt, self._waiting[after - 1][0])
        return after if following >= preceding else after - 1

    def _start(self) -> int:
        """The first of the two neighbours that share the longest prefix."""
        shared = [
            common_prefix_length(one[0], other[0])
            for one, other in zip(self._waiting, self._waiting[1:], strict=False)
        ]
        return shared.index(max(shared)) if shared else 0
