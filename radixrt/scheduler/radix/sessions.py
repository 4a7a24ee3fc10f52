"""Where did a session's requests end, and what did it alone use?

A client that names its session need not say which tokens were its own when it has ended.
"""

from collections import Counter, OrderedDict, deque

from radixrt.scheduler.radix.hint import NONE, Hint
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.tree import RadixTree

MAX_SESSIONS = 65_536
"""Beyond it, the session that was heard of longest ago is forgotten: its KV goes by its last use like any other."""

ENDS_PER_SESSION = 16
"""A session whose requests build on each other has one end, or few; of one with many branches the latest are known."""

Session = tuple[str, str]
"""Cache salt and name: a name means something only among the requests that share prefixes."""


class Sessions:
    """The nodes at which the requests of each session have ended."""

    def __init__(self, tree: RadixTree, max_sessions: int = MAX_SESSIONS) -> None:
        self._tree = tree
        self._max_sessions = max_sessions
        self._ends: OrderedDict[Session, deque[Node]] = OrderedDict()
        self._users: Counter[Node] = Counter()
        """How many sessions each of those nodes is an end of."""

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, name: str, salt: str, end: Node) -> None:
        """A request of a session has ended at ``end``."""
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

    def release(self, name: str, salt: str) -> int:
        """Give what a session alone has used the level "none", whatever was asked for it before.

        What a running sequence uses, a lease holds, another session ended at or others go on from is not touched.

        Returns:
            Pages that go first from now on; 0 of an unknown session.
        """
        ends = self._drop((salt, name))
        released: Counter[Node] = Counter()
        """How many children of each node are let go of."""
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
