"""The view of the tree against sums over all nodes, and while the tree changes under it."""

import random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.cache_tree import CacheTree, CacheTreeNode
from radixrt.messages.calls import CacheTreeCall, CallReply
from radixrt.messages.ids import unpack_ids
from radixrt.scheduler.invariants import InvariantError, check_sums
from radixrt.scheduler.radix import view as tree_view
from radixrt.scheduler.radix.node import HIGH, Hint, Node
from radixrt.scheduler.radix.tree import RadixTree
from radixrt.scheduler.radix.view import FEWEST_CHILDREN, KnownNodes, TreeView
from tests.scheduler.engine_model import EngineModel, limits
from tests.suite import examples

PAGE_SIZE = 2
prompts = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 2), max_size=12)),
    max_size=30,
)


def insert(tree: RadixTree, name: CacheRoot, pages: list[int], first_page: int) -> None:
    """Put a prompt of which each page is one token, twice."""
    tokens = np.repeat(np.array(pages, dtype=np.int32), PAGE_SIZE)
    root = tree.lock_root(name)
    ids = np.arange(first_page, first_page + len(pages), dtype=np.int32)
    end, _ = tree.insert(root, tokens, ids)
    tree.move_lock(root, end)
    tree.unlock(end)


def grown(prompts: list[tuple[str | CacheRoot, list[int]]], seen_at: float) -> RadixTree:
    """A prompt a second, and then a wait until ``seen_at``."""
    now = 0.0
    tree = RadixTree(PAGE_SIZE, clock=lambda: now)
    for number, (salt, pages) in enumerate(prompts):
        now = float(number)
        if pages:
            name = salt if isinstance(salt, CacheRoot) else CacheRoot(salt=salt)
            insert(tree, name, pages, 100 * number)
    now = seen_at
    return tree


def view(tree: RadixTree, depth: int = 3, children: int = 16) -> CacheTree:
    slices = TreeView(
        tree, CacheTreeCall(call_id=1, depth=depth, children=children), tree.clock
    ).slices()
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def all_below(node: Node) -> list[Node]:
    return [node] + [other for child in node.children.values() for other in all_below(child)]


@settings(max_examples=examples(150), deadline=None)
@given(prompts=prompts, depth=st.integers(0, 5), children=st.integers(1, 4))
def test_every_number_of_the_view_is_a_sum_over_nodes(
    prompts: list, depth: int, children: int
) -> None:
    tree = grown(prompts, 50.0)
    seen = view(tree, depth, children)
    assert seen.total_tokens == tree.num_pages * PAGE_SIZE
    assert seen.total_nodes == tree.num_nodes
    assert [n.total_tokens for n in seen.namespaces] == sorted(
        (sum(n.num_pages * PAGE_SIZE for n in all_below(root)) for root in tree.roots().values()),
        reverse=True,
    )[:children]
    for namespace in seen.namespaces:
        salts = [
            s for s, r in tree.roots().items() if len(all_below(r)) - 1 == namespace.total_nodes
        ]
        assert any(bool(salt.salt) == namespace.salted for salt in salts)
        roots = [tree.roots()[salt] for salt in salts if bool(salt.salt) == namespace.salted]
        assert any(agrees(namespace.children, root, depth, children) for root in roots)


def agrees(shown: list[CacheTreeNode], parent: Node, depth: int, children: int) -> bool:
    """Whether the view shows the largest children of a node, and each as it is."""
    if depth == 0:
        return not shown
    totals = [sum(n.num_pages for n in all_below(child)) for child in parent.children.values()]
    if [n.total_tokens for n in shown] != [
        PAGE_SIZE * total for total in sorted(totals, reverse=True)[:children]
    ]:
        return False
    for node in shown:
        first = unpack_ids(node.first_token_ids)
        actual = parent.children.get(first[:PAGE_SIZE].tobytes())
        if actual is None:
            return False  # of another root with as many nodes
        below = all_below(actual)
        exact = (
            node.num_tokens == len(actual.tokens)
            and node.total_nodes == len(below)
            and np.array_equal(first, actual.tokens[:32])
            and not node.locked
            and node.idle_s == pytest.approx(50.0 - max(n.stamp for n in below) * 1e-9, abs=1e-6)
        )
        if not exact or not agrees(node.children, actual, depth - 1, children):
            return False
    return True


def test_locks_pins_and_retention_are_shown_until_they_end() -> None:
    tree = grown([("", [1, 1]), ("", [2, 2]), ("", [3, 3])], 3.0)
    one, two, three = (tree.match(np.full(4, first, dtype=np.int32)).node for first in (1, 2, 3))  # type: ignore[union-attr]
    tree.lock(one)
    tree.lock(two)
    tree.pin(two)
    tree.give_hint(three, Hint(HIGH, expires=10.0))
    shown = {int(unpack_ids(n.first_token_ids)[0]): n for n in view(tree).namespaces[0].children}
    assert [(shown[n].locked, shown[n].pinned) for n in (1, 2, 3)] == [
        (True, False),
        (True, True),
        (False, False),
    ]
    assert [shown[n].retention for n in (1, 2, 3)] == ["default", "default", "high"]
    tree.clock = lambda: 10.0
    assert {n.retention for n in view(tree).namespaces[0].children} == {"default"}


def test_a_walk_in_slices_survives_what_happens_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_view, "NODES_PER_LOOK", 1)
    monkeypatch.setattr(tree_view, "SLICE_S", 0.0)
    rng = random.Random(3)
    tree, next_page = RadixTree(PAGE_SIZE), 0
    for _ in range(20):
        slices = TreeView(tree, CacheTreeCall(call_id=1, depth=2)).slices()
        num_slices, done = 0, False
        while not done:
            for _ in range(rng.randrange(3)):
                pages = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
                insert(tree, CacheRoot(salt=rng.choice(["", "a"])), pages, next_page)
                next_page += len(pages)
            tree.evict(rng.randrange(6))
            try:
                next(slices)
                num_slices += 1
            except StopIteration as end:
                done = True
                assert end.value.total_nodes == tree.num_nodes
            assert num_slices < 500
        for root in tree.roots().values():
            check_sums(root)
    exact = view(tree)
    assert sum(n.total_nodes for n in exact.namespaces) == tree.num_nodes
    assert sum(n.total_tokens for n in exact.namespaces) == tree.num_pages * PAGE_SIZE


def test_a_view_of_a_large_tree_is_answered_while_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_view, "NODES_PER_LOOK", 1)
    monkeypatch.setattr(tree_view, "SLICE_S", 0.0)
    model, replies = EngineModel(limits(num_pages=200)), []
    for first in range(20):
        model.add([first] * 12, max_tokens=0)
    model.run()
    calls = model.calls(replies)
    calls.take(CacheTreeCall(call_id=1))
    calls.take(CacheTreeCall(call_id=2, children=3))
    turns = 0
    while calls.is_working:
        model.add([turns] * 9, max_tokens=1)
        model.plan()
        model.absorb()
        calls.work()
        turns += 1
    assert turns > 20 and [reply.call_id for reply in replies] == [1, 2]
    assert len(replies[0].value.namespaces[0].children) == 16
    assert len(replies[1].value.namespaces[0].children) == 3


def test_a_salt_for_each_of_many_tenants_shows_the_biggest_and_counts_all() -> None:
    tree = grown([(f"tenant {n}", [0] * (1 + n % 7)) for n in range(500)], seen_at=500.0)
    shown = view(tree, children=16)
    assert len(shown.namespaces) == 16
    assert {namespace.total_tokens for namespace in shown.namespaces} == {7 * PAGE_SIZE}
    assert shown.total_tokens == tree.num_pages * PAGE_SIZE


def searched(tree: RadixTree, known: KnownNodes, **call: object) -> CacheTree:
    slices = TreeView(tree, CacheTreeCall(call_id=1, **call), tree.clock, known).slices()  # type: ignore[arg-type]
    try:
        while True:
            next(slices)
    except StopIteration as end:
        return end.value


def test_a_view_shows_no_more_than_it_may_and_the_largest_first() -> None:
    tree = grown([("", [first] * (1 + first)) for first in range(40)], 50.0)
    shown = searched(tree, KnownNodes(), most=5, children=100).namespaces[0]
    assert [node.num_tokens for node in shown.children] == [80, 78, 76, 74, 72]
    assert shown.num_children == 40 and shown.total_nodes == 40


def test_of_many_small_prefixes_some_are_shown() -> None:
    tree = grown([("", [first, *[0] * (first % 5)]) for first in range(1, 5000)], 50.0)
    shown = searched(tree, KnownNodes(), children=100).namespaces[0]
    assert [node.num_tokens for node in shown.children] == [5 * PAGE_SIZE] * FEWEST_CHILDREN


def test_a_view_below_a_node_shows_its_part_and_the_way_to_it() -> None:
    stem = [7] * 3
    tree = grown([("", [1]), ("", [*stem, 1]), ("", [*stem, 2]), ("", [*stem, 2, 3]), ("", [*stem, 2, 4])], 9.0)  # fmt: skip
    known = KnownNodes()
    largest = searched(tree, known).namespaces[0].children[0]
    branch = largest.children[0]
    assert (largest.total_tokens, branch.total_tokens, branch.num_children) == (14, 6, 2)
    below = searched(tree, known, below=branch.node)
    (namespace,) = below.namespaces
    assert [node.node for node in below.above] == [largest.node]
    assert [node.node for node in namespace.children] == [branch.node]
    assert (below.total_tokens, below.total_nodes) == (6, 3)
    assert len(namespace.children[0].children) == 2


def test_a_node_keeps_its_id_when_its_edge_is_split_and_one_that_is_gone_shows_the_whole() -> None:
    tree, known = grown([("", [1, 2, 3]), ("", [5])], 9.0), KnownNodes()
    node = searched(tree, known).namespaces[0].children[0].node
    insert(tree, BASE_ROOT, [1, 9], 500)
    below = searched(tree, known, below=node)
    assert [n.num_tokens for n in below.above] == [2] and below.total_tokens == 4
    tree.evict(100)
    insert(tree, BASE_ROOT, [4], 600)
    gone = searched(tree, known, below=node)
    assert gone.above == [] and gone.total_tokens == 2


def test_nobody_sees_below_a_node_of_another_namespace() -> None:
    tree, known = (
        grown([(CacheRoot("key:alice"), [1, 2]), (CacheRoot("key:bob"), [3])], 9.0),
        KnownNodes(),
    )
    alices = next(n for n in searched(tree, known).namespaces if n.namespace == "key:alice")
    seen = searched(tree, known, below=alices.children[0].node, namespace="key:bob")
    assert [n.namespace for n in seen.namespaces] == ["key:bob"] and seen.total_tokens == 2


def test_uses_are_counted_along_the_path() -> None:
    tree = grown([("", [1, 1, 1]), ("", [1, 1, 2]), ("", [1, 1, 2])], 9.0)
    stem = view(tree).namespaces[0].children[0]
    assert stem.num_tokens == 4
    assert sorted(node.uses for node in stem.children) == [1, 2] and stem.uses == 3


def test_a_wrong_sum_is_found() -> None:
    tree = grown([("", [1, 2]), ("", [1, 3])], 9.0)
    (root,) = tree.roots().values()
    check_sums(root)
    next(iter(root.children.values())).pages_below += 1
    with pytest.raises(InvariantError):
        check_sums(root)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_that_fails_ends_alone(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler goes on, and other calls are answered."""
    replies: list[CallReply] = []
    model = EngineModel(limits(num_pages=200))
    model.add([1] * 12, max_tokens=0)
    model.run()
    calls = model.calls(replies)
    with monkeypatch.context() as broken:
        broken.setattr(tree_view.TreeView, "__init__" if at_once else "slices", lambda *_: {}[1])
        if not at_once:
            broken.setattr(tree_view.TreeView, "slices", lambda _: (1 / n for n in range(2)))
        calls.take(CacheTreeCall(call_id=1))
        calls.work()
        calls.work()
    calls.take(CacheTreeCall(call_id=2))
    while calls.is_working:
        calls.work()
    failed, whole = replies
    assert failed.error is not None and failed.error.status == 500 and failed.call_id == 1
    assert whole.error is None and whole.value.total_nodes == 1
