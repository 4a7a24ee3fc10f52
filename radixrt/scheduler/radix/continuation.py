"""Finds the tokens that followed a prefix the last time.

The radix tree holds prompts with their answers, so it knows how a prompt went on: for requests that
are sent again, forks, agents that repeat themselves. Nothing else needs to be stored for that. A
root has one cache salt, so no text of another is found.
"""

from itertools import islice

from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.scheduler.radix.match import Match
from radixrt.scheduler.radix.node import ID_BYTES, Node, Packed
from radixrt.scheduler.radix.tree import RadixTree

MAX_CHILDREN = 64
"""Children of a node that are looked at: the newest."""

_DEEPEST = 256
"""Nodes along a continuation."""


def continuation(tree: RadixTree, match: Match, rest: TokenIds, limit: int) -> TokenIds:
    """The tokens behind a prefix, along the branches used last.

    >>> import numpy as np
    >>> tree = RadixTree(page_size=2)
    >>> root = tree.lock_root()
    >>> leaf, _ = tree.insert(root, np.arange(8, dtype=np.int32), np.arange(4, dtype=np.int32))
    >>> prompt = np.array([0, 1, 2], np.int32)
    >>> continuation(tree, tree.match(prompt), prompt[2:], 4).tolist()
    [3, 4, 5, 6]

    Args:
        match: the whole pages of the prefix, and not split or joined since.
        rest: tokens of the prefix behind the match: [n], int32.
        limit: most tokens.

    Returns:
        [at most limit], int32; empty if nothing is known.
    """
    known = rest.tobytes()
    most = len(known) + limit * ID_BYTES
    for followed in _followed(tree, match, known, most):
        if len(followed) > len(known) and followed.startswith(known):
            return unpack_ids(followed[len(known) : most])
    return unpack_ids(b"")


def _followed(tree: RadixTree, match: Match, known: bytes, most: int) -> list[bytes]:
    """What has followed a match: at most one branch, and the tokens of the last request that ended
    there."""
    node, page_bytes = match.node, tree.page_size * ID_BYTES
    start = match.pages_in_edge * page_bytes
    if start < len(node.edge):
        return [_along(node, node.edge[start:], most)]
    child = _last_used(node, known[:page_bytes])
    branches = [] if child is None else [_along(child, child.edge, most)]
    return branches if node.end is None else [*branches, node.end.tail]


def _along(node: Node, edge: Packed, most: int) -> bytes:
    """The packed tokens of an edge and of those below ``node``, at its end."""
    parts, length = [edge], len(edge)
    for _ in range(_DEEPEST):
        if length >= most:
            break
        child = _last_used(node, b"")
        if child is None:
            tail = b"" if node.end is None else node.end.tail
            parts.append(tail)
            break
        parts.append(child.edge)
        length += len(child.edge)
        node = child
    return b"".join(parts)


def _last_used(node: Node, beginning: bytes) -> Node | None:
    """The child used last, of the newest ones whose first page begins with these bytes."""
    keys = islice(node.newest_keys(), MAX_CHILDREN)
    children = [node.children[key] for key in keys if key.startswith(beginning)]
    return max(children, key=lambda child: child.last_used, default=None)
