"""Sessions: the nodes that a client's session has used, so that they can be released together.

A client that names its session in its requests need not say which tokens were its own when the
session ends.
"""

from collections import Counter, OrderedDict, deque

from radixrt.scheduler.radix.hint import NONE, Hint
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.tree import RadixTree

MAX_SESSIONS = 65_536
"""Beyond it, the least recently used session is forgotten, and its KV is evicted like any other."""

ENDS_PER_SESSION = 16
"""A session whose requests continue each other has few ends; of a session with many branches the
latest are kept."""

LOOKED_AT = 2
"""Sessions of which each note looks whether their KV has left the cache. More than one, so that
they are found as fast as new ones come."""

Session = tuple[str, str]
"""Cache salt and name."""


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

    def note(self, name: str, salt: str, end: Node) -> None:
        """A request of a session has ended at ``end``."""
        if (salt, name) not in self._ends:
            self._to_look_at.append((salt, name))
        ends = self._ends.setdefault((salt, name), deque())
        self._ends.move_to_end((salt, name))
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

    def release(self, name: str, salt: str) -> int:
        """Set the level of all nodes that only this session has used to "none".

        Nodes that are locked or leased, at which another session ended, or that others continue
        keep their level.

        Returns:
            Number of pages that are evicted first from now on; 0 for an unknown session.
        """
        ends = self._drop((salt, name))
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
