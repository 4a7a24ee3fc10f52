"""What does a request's word mean for the nodes that it used?

A node may be used by many, and they may want different things of it:

- A level of retention is a wish for the tokens it names, whoever else uses them; the edge where they end is cut. "high" holds
  until its own expiry against every other word, and of two the one that holds longer; else the latest request's word
  holds, and that of a request without hints is "default".
- "none" speaks for what the request alone has used: a prefix that others go on from keeps what they want of it.
- When a client will go on is noted where its request ended. What is above inherits it when it comes to that
  (:meth:`radixrt.scheduler.radix.tree.RadixTree.evict`).
"""

from dataclasses import dataclass

from radixrt.messages.requests import CacheHints
from radixrt.scheduler.radix.hint import DEFAULT, HIGH, LEVELS, NONE, Hint
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class _Wish:
    """A client's word for the first pages of a path."""

    num_pages: int
    level: int
    expires: float | None


class HintWriter:
    """Writes down what requests say when they end."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree

    def write(
        self, end: Node, num_pages: int, hints: CacheHints, now: float, priority: int = 0
    ) -> None:
        """Apply a request's hints to its path, which it still holds a lock on.

        Args:
            end: the node at whose end the request's ``num_pages`` pages in the tree end.
            now: when the request ended, on the tree's clock.
            priority: of the request, where the policy asks for it.
        """
        wishes = self._wishes(hints, num_pages, now)
        node, stop, is_private = end, num_pages, not end.children
        while node.parent is not None:
            is_private = is_private and node.lock_count == 1 and len(node.children) <= 1
            self._cut_where_wishes_end(node, stop, wishes)
            word = _highest(wishes, stop, priority)
            if word.level != NONE or is_private:
                node.hint = _settle(node.hint, word, now)
            stop -= node.num_pages
            node = node.parent
        if hints.next_use_s is not None and end.parent is not None:
            next_use = now + hints.next_use_s
            end.hint = (end.hint or Hint()).with_next_use(next_use)

    def _wishes(self, hints: CacheHints, num_pages: int, now: float) -> list[_Wish]:
        wishes = []
        for wish in hints.retain:
            covered = num_pages
            if wish.num_tokens is not None:
                covered = min(num_pages, wish.num_tokens // self._tree.page_size)
            expires = None if wish.ttl_s is None else now + wish.ttl_s
            wishes.append(_Wish(covered, LEVELS[wish.level], expires))
        return wishes

    def _cut_where_wishes_end(self, node: Node, stop: int, wishes: list[_Wish]) -> None:
        """Leave ``node`` with the last part of its edge of which all wishes are the same."""
        start = stop - node.num_pages
        inside = [wish.num_pages for wish in wishes if start < wish.num_pages < stop]
        if inside:
            self._tree.split(node, max(inside) - start)


def _highest(wishes: list[_Wish], num_pages: int, priority: int) -> Hint:
    """Of what is wished for the first ``num_pages`` pages, the highest level, and of equal ones the longest."""
    about = [wish for wish in wishes if wish.num_pages >= num_pages]
    if not about:
        return Hint(priority=priority)
    best = max(about, key=lambda wish: (wish.level, _end_of(wish.expires)))
    return Hint(best.level, best.expires if best.level != DEFAULT else None, None, priority)


def _settle(old: Hint | None, word: Hint, now: float) -> Hint | None:
    """What holds for a node after the latest word."""
    old = None if old is None else old.at(now)
    if old is None:
        return word if word.says_something else None
    kept = word
    if old.level == HIGH and (word.level != HIGH or _end_of(old.expires) > _end_of(word.expires)):
        kept = Hint(HIGH, old.expires, None, word.priority)
    return kept if kept.says_something else None


def _end_of(expires: float | None) -> float:
    return float("inf") if expires is None else expires
