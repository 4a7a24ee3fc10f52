"""The heap of leaves against a sorted list."""

import hypothesis.strategies as st
from hypothesis import given, settings

from radixrt.scheduler.radix.eviction import LeafHeap
from radixrt.scheduler.radix.node import Node
from tests.suite import examples

operations = st.lists(
    st.tuples(st.sampled_from(["push", "push", "use", "lock", "pop"]), st.integers(0, 3)),
    max_size=60,
)


@settings(max_examples=examples(300), deadline=None)
@given(operations=operations, stamps=st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_the_smallest_live_key_comes_first_also_among_leaves_that_are_equal(
    operations: list[tuple[str, int]], stamps: list[int]
) -> None:
    root, heap = Node(None, b"", b""), LeafHeap()
    leaves = [Node(root, b"", b"", stamp=stamp) for stamp in stamps]
    live: dict[int, tuple[int, int]] = {}  # key and stamp of each leaf that can be popped
    for action, which in operations:
        leaf = leaves[which]
        if action == "push" and leaf.lock_count == 0:
            heap.push(which % 2, leaf)
            live[which] = (which % 2, leaf.stamp)
        elif action == "use":
            leaf.stamp += 1
            live.pop(which, None)
        elif action == "lock":
            leaf.lock_count = 1
            live.pop(which, None)
        elif action == "pop":
            popped = heap.pop()
            assert (popped is None) == (not live)
            if popped is not None:
                index = next(i for i, leaf in enumerate(leaves) if leaf is popped)
                assert live[index] == min(live.values())
                popped.stamp += 1  # the tree takes it, or offers what is left of it again
                del live[index]
