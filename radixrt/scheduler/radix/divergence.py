"""Finds how cached prompts went on behind a prefix: for explanations of cache misses, and for
drafts.

The facts for an explanation are noted when a sequence is admitted, because the tree changes later.
For sequences whose client has not asked, the search is short, so that it costs some microseconds.

The radix tree holds prompts with their answers, so nothing else needs to be stored for drafts. A
cache root has a tree of its own, so no text of another is found.
"""

from collections import OrderedDict
from itertools import islice

import numpy as np

from radixrt.messages.cache_explanation import SHOWN_TOKENS, CacheFacts, Eviction
from radixrt.messages.ids import ID_BYTES, TokenIds, pack_ids, unpack_ids
from radixrt.scheduler.radix.ghosts import Before, Ghost
from radixrt.scheduler.radix.key_ids import tokens_of
from radixrt.scheduler.radix.node import Match, Node, Packed, SequenceEnd, common_length
from radixrt.scheduler.radix.return_hazards import SHARED, Visit
from radixrt.scheduler.radix.tree import RadixTree
from radixrt.scheduler.sequence import Sequence

MAX_REMEMBERED = 1000
"""Sequences whose facts can be asked for afterwards; up to some 600 bytes each."""

MAX_COMPARED = 64
"""Children of a node, and other roots, that are looked at for a sequence whose client has not
asked."""

MAX_COMPARED_IF_ASKED = 4096

MAX_MATCHED_ROOTS = 8
"""Other roots under which a whole prompt is looked up."""

_DEEPEST = 64
"""Levels searched for the end of a sequence below a node."""


class RecentFacts:
    """The facts of the last sequences."""

    def __init__(self) -> None:
        self._facts: OrderedDict[int, CacheFacts] = OrderedDict()

    def keep(self, seq_id: int, facts: CacheFacts) -> None:
        self._facts[seq_id] = facts
        if len(self._facts) > MAX_REMEMBERED:
            self._facts.popitem(last=False)

    def find(self, seq_id: int) -> CacheFacts | None:
        return self._facts.get(seq_id)


def cache_facts(tree: RadixTree, sequence: Sequence, match: Match | None) -> CacheFacts:
    """The facts about a sequence that is admitted now."""
    most = MAX_COMPARED_IF_ASKED if sequence.options.cache_hints.explain else MAX_COMPARED
    reusable = sequence.cacheable_tokens()
    facts = CacheFacts(reusable_tokens=len(reusable))
    start = 0 if match is None else match.num_pages * tree.page_size
    if match is not None:
        prompt = sequence.tokens[start : sequence.num_prompt]
        seen, continuation, end = _nearest(
            tree, match, prompt[: tree.page_size + SHOWN_TOKENS].tobytes(), most
        )
        facts.seen_tokens = start + seen // ID_BYTES
        following = unpack_ids(bytes(continuation[seen : seen + SHOWN_TOKENS * ID_BYTES]))
        facts.cached_ids = pack_ids(tokens_of(following))
        if end is not None:
            facts.seq_id, facts.is_own = end.seq_id, end.tenant == sequence.options.tenant.name
    if len(reusable) - start >= tree.page_size:
        if (ghost := _evicted_page(tree, sequence, match)) is not None:
            facts.evicted = Eviction(seconds_ago=tree.clock() - ghost.time, rule=ghost.rule)
        if len(tree.roots()) > (match is not None):
            _note_other_roots(facts, tree, sequence, start, most)
    return facts


def turn_before(tree: RadixTree, sequence: Sequence, match: Match | None) -> Visit | None:
    """The last visit of the conversation that a prompt goes on with: that of which the page behind
    the match was evicted, or of which the match has more than half."""
    ghost = _evicted_page(tree, sequence, match)
    if ghost is not None and ghost.visit not in (None, SHARED):
        return ghost.visit
    if match is None:
        return None
    node = match.node
    while node.visit is None and len(node.children) == 1:  # a prompt of several chunks
        node = next(iter(node.children.values()))
    visit = node.visit
    is_most = visit is not None and 2 * match.num_pages > visit.num_pages
    return visit if is_most and visit is not SHARED else None


def _evicted_page(tree: RadixTree, sequence: Sequence, match: Match | None) -> Ghost | None:
    """What is remembered of the page behind a match."""
    start = 0 if match is None else match.num_pages * tree.page_size
    missing = sequence.cacheable_tokens()[start : start + tree.page_size]
    before = sequence.root if match is None else _before(tree, match)
    return tree.ghosts.find(before, missing.tobytes())


def _before(tree: RadixTree, match: Match) -> Before:
    """The last page of a match, as the ghost list names it."""
    if match.num_pages == 0:
        return tree.root_of(match.node)
    return int(match.node.pages[match.pages_in_edge - 1])


def _nearest(
    tree: RadixTree, match: Match, rest: bytes, most: int
) -> tuple[int, bytes, SequenceEnd | None]:
    """The cached continuation of a match with which the rest of the prompt agrees longest: the
    number of bytes that agree, the continuation, and the request that used it last.

    Args:
        rest: the packed tokens of the prompt behind the match.
        most: children to compare, the newest ones.
    """
    node, page_bytes = match.node, tree.page_size * ID_BYTES
    found: list[tuple[bytes, SequenceEnd | None]] = []
    if match.pages_in_edge < node.num_pages:
        found.append(
            (_continuation(node, match.pages_in_edge * page_bytes, page_bytes), _end(node))
        )
    else:
        if (child := _nearest_child(node, rest[:page_bytes], most)) is not None:
            found.append((_continuation(child, 0, page_bytes), _end(child)))
        if node.end is not None:
            found.append((node.end.tail, node.end))
    agreeing = [common_length(continuation, rest, 0) for continuation, _ in found]
    if not found:
        return 0, b"", None
    best = max(range(len(found)), key=agreeing.__getitem__)
    return agreeing[best], *found[best]


def _nearest_child(node: Node, page: bytes, most: int) -> Node | None:
    """The child, of the newest ones, whose first page agrees longest with the packed tokens, and
    then at the most places."""
    keys = list(islice(node.newest_keys(), most))
    if not keys:
        return None
    best = 0
    if len(keys) > 1 and page:
        pages = np.frombuffer(b"".join(keys), np.int32).reshape(len(keys), -1)
        wanted = np.frombuffer(page, np.int32)
        equal = pages[:, : len(wanted)] == wanted
        lengths = np.where(equal.all(axis=1), len(wanted), equal.argmin(axis=1))
        best = int((lengths * len(wanted) + equal.sum(axis=1)).argmax())
    return node.children[keys[best]]


def _continuation(node: Node, start: int, page_bytes: int) -> bytes:
    """The packed tokens of an edge from a byte on and those below it, along the newest nodes: as
    many as are compared, and those after the last full page."""
    most = page_bytes + SHOWN_TOKENS * ID_BYTES
    continuation = bytes(node.edge[start : start + most])
    for _ in range(_DEEPEST):
        if len(continuation) >= most or not node.children:
            break
        node = node.children[next(node.newest_keys())]
        continuation += bytes(node.edge[: most - len(continuation)])
    if len(continuation) < most and not node.children and node.end is not None:
        continuation += node.end.tail
    return continuation


def _end(node: Node) -> SequenceEnd | None:
    """The last request that ended at the end of a node or, if there is none, below it."""
    for _ in range(_DEEPEST):
        if node.end is not None or not node.children:
            return node.end
        node = node.children[next(node.newest_keys())]
    return None


def _note_other_roots(
    facts: CacheFacts, tree: RadixTree, sequence: Sequence, start: int, most: int
) -> None:
    """Note how many leading tokens of a prompt its key has cached under another salt, and under
    another adapter, if they are more than ``start``."""
    tokens, own = sequence.cacheable_tokens(), sequence.root
    first_page = tokens[: tree.page_size].tobytes()
    matched = 0
    for name, root in islice(reversed(tree.roots().items()), most):
        if first_page not in root.children or name == own or name.tenant != own.tenant:
            continue
        match = tree.match(tokens, name)
        assert match is not None
        end, found = _end(match.node), match.num_pages * tree.page_size
        if end is not None and end.tenant == sequence.options.tenant.name and found > start:
            if name.salt != own.salt:
                facts.other_salt_tokens = max(facts.other_salt_tokens, found)
            else:
                facts.other_adapter_tokens = max(facts.other_adapter_tokens, found)
        matched += 1
        if matched == MAX_MATCHED_ROOTS:
            break


MAX_CHILDREN = 64
"""Children of a node that are looked at: the newest."""

_LONGEST_PATH = 256
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
    for _ in range(_LONGEST_PATH):
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
