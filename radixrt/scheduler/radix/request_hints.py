"""Applies a finished request's cache hints to its nodes.

Several requests may use a node and hint differently:

- A retention level applies to the leading tokens that it names, for all their users; the edge is
  split where they end. "high" holds until it expires, against every other level; of two "high" the
  one that expires later holds. Otherwise the latest request decides, and a request without hints
  means "default".
- "none" is for nodes that the request alone has used; a prefix that others continue keeps its
  level.
- The next use is noted at the node where the request ended. Its parent inherits it when the node is
  evicted (:meth:`radixrt.scheduler.radix.tree.RadixTree.evict`).
"""

from radixrt.messages.requests import CacheHints
from radixrt.scheduler.radix.hint import DEFAULT, HIGH, LEVELS, NO_HINT, NONE, Hint
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.tree import RadixTree


def apply_hints(
    tree: RadixTree, end: Node, num_pages: int, hints: CacheHints, now: float, priority: int = 0
) -> None:
    """Apply a request's hints to its path, on which it still holds a lock.

    Args:
        end: the node at whose end the request's ``num_pages`` pages in the tree end.
        now: time at which the request ended, in seconds on the tree's clock.
        priority: of the request, for policies that order by it; otherwise 0.
    """
    retained = _retained_pages(hints, num_pages, tree.page_size, now)
    node, stop, is_private = end, num_pages, not end.children
    while node.parent is not None:
        is_private = is_private and node.lock_count == 1 and len(node.children) <= 1
        start = stop - node.num_pages
        cuts = [pages for pages, _ in retained if start < pages < stop]
        if cuts:
            tree.split(node, max(cuts) - start)  # node stays the lower part
        hint = _strongest([hint for pages, hint in retained if pages >= stop], priority)
        if hint.level != NONE or is_private:
            node.hint = _combined(node.hint, hint, now)
        stop -= node.num_pages
        node = node.parent
    if hints.next_use_s is not None and end.parent is not None:
        end.hint = (end.hint or Hint()).with_next_use(now + hints.next_use_s)


def _retained_pages(
    hints: CacheHints, num_pages: int, page_size: int, now: float
) -> list[tuple[int, Hint]]:
    """Each retention of a request as a number of leading pages and the hint for them."""
    retained = []
    for retention in hints.retain:
        covered = num_pages
        if retention.num_tokens is not None:
            covered = min(num_pages, retention.num_tokens // page_size)
        expires = None if retention.ttl_s is None else now + retention.ttl_s
        retained.append((covered, Hint(LEVELS[retention.level], expires)))
    return retained


def _strongest(hints: list[Hint], priority: int) -> Hint:
    """The hint of the highest level, and of equal ones the one that expires last."""
    if not hints:
        return Hint(priority=priority) if priority else NO_HINT
    best = max(hints, key=lambda hint: (hint.level, _expiry(hint)))
    return Hint(best.level, best.expires if best.level != DEFAULT else None, None, priority)


def _combined(old: Hint | None, new: Hint, now: float) -> Hint | None:
    """A node's hint after a request with the hint ``new`` for it."""
    old = NO_HINT if old is None else old.valid_at(now) or NO_HINT
    if old.level == HIGH and (new.level != HIGH or _expiry(old) > _expiry(new)):
        new = Hint(HIGH, old.expires, None, new.priority)
    return new if new.says_something else None


def _expiry(hint: Hint) -> float:
    return float("inf") if hint.expires is None else hint.expires
