"""Cached prefixes that somebody waits for go last, and whoever waits loses no page of the pool to
that."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.base.settings.setting import EvictionPolicyName
from radixrt.scheduler.radix.eviction import Awaited, Hinted, least_recently_used
from radixrt.scheduler.radix.node import HIGH, Hint, Node
from radixrt.scheduler.radix.tree import RadixTree
from tests.scheduler.engine_model import EngineModel, limits
from tests.suite import examples

LENGTH = 3


def new_tree() -> tuple[RadixTree, Awaited]:
    clock = lambda: 0.0  # noqa: E731
    policy = Awaited(Hinted(least_recently_used(), clock))
    return RadixTree(1, policy, clock), policy


def insert(tree: RadixTree, tokens: list[int]) -> Node:
    """Put a prompt into the tree whose pages are called like its tokens."""
    array, root = np.array(tokens, dtype=np.int32), tree.lock_root()
    node, _ = tree.insert(root, array, array)
    tree.move_lock(root, node)
    tree.unlock(node)
    return node


def prompt(number: int) -> list[int]:
    return list(range(10 * number, 10 * number + LENGTH))


@settings(max_examples=examples(200), deadline=None)
@given(
    levels=st.lists(st.booleans(), min_size=1, max_size=8),
    waits=st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=12),
    steps=st.lists(st.integers(1, 7), min_size=1, max_size=30),
)
def test_the_order_is_that_of_a_sorted_list(
    levels: list[bool], waits: list[tuple[int, bool]], steps: list[int]
) -> None:
    """Prompts without a common beginning: high ones last, then awaited ones, who came first among
    them last of all."""
    tree, policy = new_tree()
    ends = [insert(tree, prompt(number)) for number in range(len(levels))]
    for end, high in zip(ends, levels, strict=True):
        if high:
            tree.give_hint(end, Hint(HIGH))
    first_arrival: dict[int, int] = {}
    for seq_id, (number, stays) in enumerate(waits):
        if number < len(ends):
            policy.expect(seq_id, float(seq_id), ends[number])
            if stays:
                first_arrival.setdefault(number, seq_id)
            else:
                policy.forget(seq_id)

    def order(number: int) -> tuple:
        arrived = first_arrival.get(number)
        used = (levels[number], number)  # a hint counts as a use
        return (levels[number], arrived is not None, -(arrived or 0), used)

    expected = [page for n in sorted(range(len(ends)), key=order) for page in prompt(n)[::-1]]
    for count in steps:
        now, expected = expected[:count], expected[count:]
        assert sorted(tree.evict(count).tolist()) == sorted(now)


def test_a_leaf_that_nobody_waits_for_any_more_goes_by_its_last_use() -> None:
    tree, policy = new_tree()
    ends = [insert(tree, prompt(number)) for number in range(3)]
    policy.expect(1, 1.0, ends[0])
    assert tree.evict(LENGTH).tolist() == prompt(1)
    policy.forget(1)
    assert tree.evict(LENGTH).tolist() == prompt(0)


def test_who_waited_for_an_evicted_leaf_waits_for_what_is_left_of_its_prefix() -> None:
    tree, policy = new_tree()
    stem = [1, 2]
    longer = insert(tree, [*stem, 3, 4])
    insert(tree, [*stem, 5])
    policy.expect(7, 1.0, longer)
    assert tree.evict(1).tolist() == [5]
    assert sorted(tree.evict(2).tolist()) == [3, 4], "all is awaited, so what is awaited goes"
    insert(tree, [8, 9])
    assert sorted(tree.evict(2).tolist()) == [8, 9], "used last, but nobody waits for it"
    policy.forget(7)
    assert sorted(tree.evict(9).tolist()) == [1, 2]


@pytest.mark.parametrize(("policy", "found"), [("fifo", 0), ("value", 16)])
def test_the_queue_says_whose_prefix_is_awaited(policy: EvictionPolicyName, found: int) -> None:
    """First come first served through a pool that is too small: who came last still finds what was
    cached."""
    engine = EngineModel(
        limits(
            schedule_policy="fcfs",
            eviction_policy=policy,
            max_running_requests=1,
            num_pages=24,
            context_length=64,
        )
    )
    for tokens in ([1] * 18, [2] * 18):
        engine.add(tokens, 1)
        engine.run()
    for number in range(3, 6):
        engine.add([number] * 40, 1)
    last = engine.add([*[1] * 16, 9], 1)
    engine.run()
    assert engine.cached[last] == found
