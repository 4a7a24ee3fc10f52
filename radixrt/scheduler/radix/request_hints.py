"""Applies a finished request's cache hints to its nodes, and keeps the nodes that each client's
session has used, so that they can be released together.

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

from collections import Counter, OrderedDict, deque

from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.requests import CacheHints
from radixrt.scheduler.radix.node import DEFAULT, HIGH, LEVELS, NO_HINT, NONE, Hint, Node
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


MAX_SESSIONS = 65_536
"""Beyond it, the least recently used session is forgotten, and its KV is evicted like any other."""

ENDS_PER_SESSION = 16
"""A session whose requests continue each other has few ends; of a session with many branches the
latest are kept."""

LOOKED_AT = 2
"""Sessions of which each note looks whether their KV has left the cache. More than one, so that
they are found as fast as new ones come."""

Session = tuple[str, str, str]
"""Tenant and salt of the cache root, and name: a session may use several adapters."""


class Sessions:
    """The nodes at which the requests of each session have ended."""

    def __init__(self, tree: RadixTree, max_sessions: int = MAX_SESSIONS) -> None:
        self._tree = tree
        self._max_sessions = max_sessions
        self._ends: OrderedDict[Session, deque[Node]] = OrderedDict()
        self._users: Counter[Node] = Counter()
        """Number of sessions of which each node is an end."""
        self._to_look_at: deque[Session] = deque()

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, name: str, root: CacheRoot, end: Node) -> None:
        """A request of a session has ended at ``end``."""
        session = root.tenant, root.salt, name
        if session not in self._ends:
            self._to_look_at.append(session)
        ends = self._ends.setdefault(session, deque())
        self._ends.move_to_end(session)
        for node in [node for node in ends if node.parent is None]:
            self._forget(ends, node)
        if end not in ends and end.parent is not None:
            ends.append(end)
            self._users[end] += 1
        if len(ends) > ENDS_PER_SESSION:
            self._forget(ends, ends[0])
        if len(self._ends) > self._max_sessions:
            self._drop(next(iter(self._ends)))
        self._drop_evicted()

    def release(self, name: str, root: CacheRoot) -> int:
        """Set the level of all nodes that only this session has used to "none".

        Nodes that are locked or leased, at which another session ended, or that others continue
        keep their level.

        Returns:
            Number of pages that are evicted first from now on; 0 for an unknown session.
        """
        ends = self._drop((root.tenant, root.salt, name))
        released: Counter[Node] = Counter()
        """Number of released children of each node."""
        pages, pending = 0, deque(ends)
        seen: set[Node] = set()
        while pending:
            node = pending.popleft()
            if node in seen or not self._is_private(node, released[node]):
                continue
            seen.add(node)
            pages += node.num_pages
            self._tree.give_hint(node, Hint(NONE))
            assert node.parent is not None
            released[node.parent] += 1
            pending.append(node.parent)
        return pages

    def _drop_evicted(self) -> None:
        """Forget sessions whose nodes have all left the tree: their release would find nothing."""
        for _ in range(min(LOOKED_AT, len(self._to_look_at))):
            session = self._to_look_at.popleft()
            if session not in self._ends:
                continue
            if all(node.parent is None for node in self._ends[session]):
                self._drop(session)
            else:
                self._to_look_at.append(session)

    def _is_private(self, node: Node, children_released: int) -> bool:
        return (
            node.parent is not None
            and node.lock_count == 0
            and len(node.children) == children_released
            and node not in self._users
        )

    def _drop(self, session: Session) -> list[Node]:
        ends = self._ends.pop(session, deque())
        dropped = list(ends)
        for node in dropped:
            self._forget(ends, node)
        return dropped

    def _forget(self, ends: deque[Node], node: Node) -> None:
        ends.remove(node)
        self._users[node] -= 1
        if not self._users[node]:
            del self._users[node]
