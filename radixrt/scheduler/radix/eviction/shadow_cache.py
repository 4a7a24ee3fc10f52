"""What would the pool hold if one policy had always ruled? A cache of hashes, without pages."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MOST_LISTED = 4
"""Pages that stacks may list for each that the cache may hold; beyond it they are cleared of those used again later."""


@dataclass(eq=False, slots=True)
class Stack:
    """What one request has used, and nobody after it: it is evicted from its end."""

    time_s: float
    kind: int
    pages: list[int]


Choose = Callable[[list[Stack]], Stack]
"""Picks the stack to evict from among the oldest and the newest of each class."""


class ShadowCache:
    """Up to ``max_pages`` hashes of pages, in the order that a policy gives to the requests they belong to."""

    def __init__(self, max_pages: int, num_classes: int, choose: Choose) -> None:
        self._max_pages = max_pages
        self._choose = choose
        self._stacks: list[deque[Stack]] = [deque() for _ in range(num_classes)]
        self._stack_of: dict[int, Stack] = {}
        self._num_listed = 0
        """Pages on all stacks, with those that were used again later."""

    def __len__(self) -> int:
        return len(self._stack_of)

    def num_found(self, pages: list[int]) -> int:
        """How many leading pages of a request are here."""
        for number, page in enumerate(pages):
            if page not in self._stack_of:
                return number
        return len(pages)

    def use(self, pages: list[int], kind: int, now: float) -> Stack:
        """Take a request's pages in, and evict what exceeds the size."""
        stack = Stack(now, kind, pages.copy())
        for page in pages:
            self._stack_of[page] = stack
        if pages:
            self._stacks[kind].append(stack)
        self._num_listed += len(pages)
        if self._num_listed > MOST_LISTED * self._max_pages + len(pages):
            self._drop_outdated()
        self._evict(len(self) - self._max_pages)
        return stack

    def use_again(self, stack: Stack, kind: int, now: float) -> None:
        """What is left of a request's pages counts as used now, by a request of another class."""
        pages = [page for page in stack.pages if self._stack_of.get(page) is stack]
        if pages:
            self.use(pages, kind, now)

    def _evict(self, count: int) -> None:
        while count > 0:
            stack = self._choose(self._ends())
            while count > 0 and self._trim(stack):
                del self._stack_of[stack.pages.pop()]
                count -= 1

    def _drop_outdated(self) -> None:
        """Where the same prompts come again and again, nothing is evicted, and :meth:`_ends` would never see them."""
        self._stacks = [deque(filter(self._keeps_latest, stacks)) for stacks in self._stacks]
        self._num_listed = len(self)

    def _keeps_latest(self, stack: Stack) -> bool:
        """Take off all pages that were used again later; False if nothing is left."""
        stack.pages = [page for page in stack.pages if self._stack_of.get(page) is stack]
        return bool(stack.pages)

    def _ends(self) -> list[Stack]:
        ends = []
        for stacks in self._stacks:
            while stacks and not self._trim(stacks[0]):
                stacks.popleft()
            while stacks and not self._trim(stacks[-1]):
                stacks.pop()
            if stacks:
                ends.append(stacks[0])
            if len(stacks) > 1:
                ends.append(stacks[-1])
        return ends

    def _trim(self, stack: Stack) -> bool:
        """Take off what was used again later; False if nothing is left."""
        pages = stack.pages
        while pages and self._stack_of.get(pages[-1]) is not stack:
            pages.pop()
        return bool(pages)
