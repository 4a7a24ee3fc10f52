"""Checks that every page and every lock is accounted for.

Tests run it after every step; a server runs it on demand.
"""

from collections import Counter

import numpy as np

from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.tree import RadixTree
from radixrt.scheduler.scheduler import Scheduler


class InvariantError(AssertionError):
    """The state contradicts itself: a bug."""


def check_invariants(scheduler: Scheduler) -> None:
    """Check tree, pages, locks and slots against each other.

    Raises:
        InvariantError: names the contradiction.
    """
    _check_tree(scheduler.state.kv.tree)
    _check_locks(scheduler)
    _check_pages(scheduler)
    _check_slots(scheduler)
    _check_states(scheduler)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def _agree(what: str, counted: int | set[int], found: int | set[int]) -> None:
    _require(counted == found, f"{what}: {counted} counted, {found} found")


def _check_tree(tree: RadixTree) -> None:
    size, pages, locked, count = tree.page_size, 0, 0, 0
    for node in tree.nodes():
        count += 1
        pages += len(node.pages)
        locked += len(node.pages) if node.lock_count else 0
        parent = node.parent
        _require(len(node.pages) > 0, "a tree node holds no page")
        _require(len(node.tokens) == len(node.pages) * size, "an edge's tokens and pages disagree")
        _require(
            parent is not None and parent.children.get(node.tokens[:size].tobytes()) is node,
            "a node is not its parent's child",
        )
    for root in tree.roots().values():
        check_sums(root)
    _agree("pages of the tree", tree.num_pages, pages)
    _agree("locked pages", tree.num_locked_pages, locked)
    _agree("nodes of the tree", tree.num_nodes, count)


def check_sums(root: Node) -> None:
    """Check the sums and times of a root and all nodes below it.

    Raises:
        InvariantError: they are not those of the nodes below.
    """
    parents_first = [root]
    for node in parents_first:
        parents_first += node.children.values()
    for node in parents_first:
        below = node.children.values()
        _require(
            node.pages_below == sum(child.num_pages + child.pages_below for child in below)
            and node.nodes_below == sum(1 + child.nodes_below for child in below),
            "a node miscounts what is below it",
        )
        _require(
            node.lock_count > node.lease_count  # told at the end of the use
            or all(child.last_used <= node.last_used for child in below),
            "a node was used later than the one above it",
        )


def _check_locks(scheduler: Scheduler) -> None:
    expected: Counter[Node] = Counter()
    for sequence in scheduler.state.slots.running():
        assert sequence.node is not None
        expected.update(sequence.node.path())
    pinned: Counter[Node] = Counter()
    for lease in scheduler.state.kv.leases.all():
        pinned.update(lease.node.path())
        _require(
            len(lease.node.prefix_pages()) == lease.num_pages, "a lease does not hold its prefix"
        )
    if scheduler.state.reads is not None:
        for node in scheduler.state.reads.held_nodes():
            expected.update(node.path())
    expected += pinned
    tree = scheduler.state.kv.tree
    for node in (*tree.nodes(), *tree.roots().values()):
        _require(
            node.lock_count == expected[node],
            f"a node is locked {node.lock_count} times, {expected[node]} running sequences and leases use it",
        )
        _agree("leases of a node", node.lease_count, pinned[node])
    _agree("pinned pages", tree.num_pinned_pages, sum(node.num_pages for node in pinned))
    pages: Counter[str] = Counter()
    for node in tree.nodes():
        pages[node.namespace] += node.num_pages
    for namespace, share in tree.shares.all().items():
        _agree(f"pages of {namespace!r}", share.num_pages, pages[namespace])
    for name, root in tree.roots().items():
        _require(
            bool(root.children) or root.lock_count > 0,
            f"namespace {name!r} is empty and still there",
        )


def _check_pages(scheduler: Scheduler) -> None:
    slots = scheduler.state.slots
    held = [
        scheduler.state.kv.allocator.free_pages(),
        *(node.pages for node in scheduler.state.kv.tree.nodes()),
    ]
    held += [slots.own_pages(sequence.slot) for sequence in scheduler.state.slots.running()]
    if scheduler.state.reads is not None:
        held.append(scheduler.state.reads.pages())
    pages = np.sort(np.concatenate(held))
    _require(
        np.array_equal(pages, np.arange(scheduler.state.limits.num_pages)),
        f"free + cached + owned are {len(pages)} pages ({len(np.unique(pages))} different) "
        f"of {scheduler.state.limits.num_pages}",
    )


def _check_slots(scheduler: Scheduler) -> None:
    slots = scheduler.state.slots
    running = Counter(sequence.account for sequence in slots.running())
    for account, count in running.items():
        _agree(f"running sequences of {account.name!r}", account.running, count)
    for slot, sequence in enumerate(slots.sequences):
        _require(
            slots.in_use[slot] == (sequence is not None), f"slot {slot} is used and empty at once"
        )
        if sequence is None:
            continue
        _require(sequence.slot == slot, f"sequence {sequence.seq_id} does not know its slot")
        planned, pages = int(slots.planned[slot]), int(slots.num_pages[slot])
        _require(
            planned <= pages * slots.page_size,
            f"slot {slot} has planned {planned} tokens on {pages} pages",
        )
        assert sequence.node is not None
        shared = sequence.node.prefix_pages()
        count = int(slots.num_tree_pages[slot])
        _require(
            np.array_equal(shared, slots.block_tables[slot, :count]),
            f"the block table of slot {slot} does not begin with its tree pages",
        )


def _check_states(scheduler: Scheduler) -> None:
    kv = scheduler.state.kv
    pages = kv.states.pages()
    counted = len(pages) + kv.states.num_free + kv.states.num_lent
    _agree("rows of states", kv.states.num_rows, counted)
    readable = kv.states.readable_pages()
    _agree("states to be read", readable, set(np.flatnonzero(kv.states.is_kept).tolist()))
    free = {*kv.allocator.free_pages().tolist()}
    for row, page in pages.items():
        _require(kv.states.has(page), f"row {row} is not the state of its page")
        _require(page not in free, f"row {row} has a state behind a free page")
