"""The waiting queue against a look at everybody who waits."""

import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.lazy_heap import LazyHeap
from radixrt.scheduler.queue.waiting_queue import LOOKUPS_PER_STEP, ORDERS, WaitingQueue
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable
from tests.scheduler.engine_model import limits
from tests.suite import examples

PAGE_SIZE = 2
DOCUMENT = [i % 3 for i in range(40)]


class Bench:
    """A queue beside a cache that sequences enter, fill and leave at once."""

    def __init__(self, policy: SchedulePolicyName) -> None:
        slots = SlotTable(4, 64, PAGE_SIZE)
        self.kv = KVCache(limits(num_pages=200, page_size=PAGE_SIZE), slots, time.monotonic)
        self.queue = WaitingQueue(ORDERS[policy], self.kv)
        self.waiting: dict[int, Sequence] = {}
        self.slots = slots
        self._next_id = 0

    def sequence(self, tokens: list[int], salt: str = "", priority: int = 0) -> Sequence:
        request = SequenceRequest(
            seq_id=self._next_id,
            token_ids=pack_ids(tokens),
            options=RequestOptions(
                sampling=SamplingParams(max_tokens=1), root=CacheRoot(salt=salt), priority=priority
            ),
        )
        self._next_id += 1
        return Sequence(request, 0.0, ())

    def add(self, tokens: list[int], salt: str = "", priority: int = 0) -> int:
        sequence = self.sequence(tokens, salt, priority)
        self.waiting[sequence.seq_id] = sequence
        self.queue.add(sequence)
        return sequence.seq_id

    def compute(self, tokens: list[int], salt: str = "") -> None:
        """Bring a prefix into the tree."""
        sequence = self.sequence(tokens, salt)
        self.kv.enter(sequence, self.kv.find_prefix(sequence))
        self.kv.grow(sequence, len(tokens))
        self.slots.planned[sequence.slot] = len(tokens)
        self.kv.publish_prefill(sequence)
        self.kv.leave(sequence)

    def evict(self, count: int) -> None:
        self.kv.allocator.free(self.kv.tree.evict(count))

    def cached_tokens(self, sequence: Sequence) -> int:
        match = self.kv.find_prefix(sequence)
        return 0 if match is None else match.num_pages * PAGE_SIZE

    def pick(self) -> int:
        sequence, match = self.queue.head()
        pages = 0 if match is None else match.num_pages
        assert pages * PAGE_SIZE == self.cached_tokens(sequence)
        self.queue.pop(sequence)
        del self.waiting[sequence.seq_id]
        return sequence.seq_id


prompts = st.tuples(st.integers(0, 40), st.lists(st.integers(0, 2), min_size=1, max_size=6)).map(
    lambda drawn: DOCUMENT[: drawn[0]] + drawn[1]
)
salts = st.sampled_from(["", "", "tenant"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), prompts, salts, st.integers(-2, 2)),
        st.tuples(st.just("compute"), prompts, salts),
        st.tuples(st.just("evict"), st.integers(1, 12)),
        st.tuples(st.just("remove"), st.integers(0, 100)),
        st.tuples(st.just("pick")),
    ),
    max_size=30,
)


@pytest.mark.parametrize("policy", ["lpm", "suf", "fcfs", "priority"])
@settings(max_examples=examples(200), deadline=None)
@given(operations=operations)
def test_every_pick_is_the_one_that_a_look_at_everybody_would_choose(
    policy: SchedulePolicyName, operations: list[tuple]
) -> None:
    bench, picks = Bench(policy), 0
    oldest_every = {"lpm": 4, "suf": 8, "fcfs": 1, "priority": 4}[policy]

    def wanted(sequence: Sequence) -> tuple[int, ...]:
        cached = bench.cached_tokens(sequence)
        urgency = sequence.options.priority if policy == "priority" else 0
        if (picks + 1) % oldest_every == 0:
            return urgency, sequence.seq_id
        return (
            urgency,
            (sequence.num_tokens - cached) if policy == "suf" else -cached,
            sequence.seq_id,
        )

    for name, *arguments in operations:
        if name == "pick" and bench.waiting:
            expected = min(bench.waiting.values(), key=wanted).seq_id
            bench.queue.refresh()
            assert bench.pick() == expected
            picks += 1
        elif name == "remove" and bench.waiting:
            seq_id = sorted(bench.waiting)[arguments[0] % len(bench.waiting)]
            bench.queue.remove(seq_id)
            del bench.waiting[seq_id]
        elif name in ("add", "compute", "evict"):
            getattr(bench, name)(*arguments)
        assert len(bench.queue) == len(bench.waiting)


def test_a_prefix_that_was_evicted_and_comes_back_longer_is_seen() -> None:
    bench = Bench("lpm")
    shorter = bench.add([0, 1, 0])
    bench.compute([0, 1])
    longer = bench.add([0, 1, 2, 0, 0])
    bench.queue.refresh()
    bench.evict(1)
    bench.compute([0, 1, 2, 0])
    bench.queue.refresh()
    assert [bench.pick(), bench.pick()] == [longer, shorter]


def test_an_insertion_concerns_only_those_who_lack_its_first_page() -> None:
    bench = Bench("lpm")
    strangers = [bench.add([10 + i, 10 + i, 3, 3]) for i in range(5 * LOOKUPS_PER_STEP)]
    reader = bench.add([*DOCUMENT, 1, 1])
    bench.compute(DOCUMENT)
    bench.queue.refresh()  # of more who wait than one step looks at
    assert bench.pick() == reader
    assert bench.pick() == strangers[0]


def test_readers_of_one_document_are_looked_up_anew_over_several_steps() -> None:
    bench = Bench("lpm")
    stranger_prefix = [7] * 12
    bench.compute(stranger_prefix)
    strangers = [bench.add([*stranger_prefix, i, i]) for i in range(3)]
    readers = [bench.add([*DOCUMENT, i]) for i in range(2 * LOOKUPS_PER_STEP)]
    bench.compute(DOCUMENT)
    for _ in range(2):
        bench.queue.refresh()
    assert [bench.pick() for _ in range(4)] == [*readers[:3], strangers[0]]


def test_a_prefix_that_was_evicted_and_computed_again_is_seen() -> None:
    bench = Bench("lpm")
    bench.compute(DOCUMENT)
    reader = bench.add([*DOCUMENT, 1])
    other = bench.add([*DOCUMENT[:20], 5, 5, 5])
    bench.evict(18)
    bench.queue.refresh()
    assert bench.pick() == reader  # four tokens are left to both; it is the older one
    reader = bench.add([*DOCUMENT, 1])
    bench.compute(DOCUMENT)
    bench.queue.refresh()
    assert bench.pick() == reader and bench.pick() == other


def test_a_prefix_that_was_evicted_and_came_back_longer_is_seen() -> None:
    """The insertion begins before the page that was known to be missing."""
    bench, stranger_prefix = Bench("lpm"), [7] * 24
    bench.compute(stranger_prefix)
    bench.compute(DOCUMENT[:20])
    stranger, reader = bench.add([*stranger_prefix, 1, 1]), bench.add([*DOCUMENT, 1])
    bench.compute(stranger_prefix)  # used later than the document
    bench.evict(5)
    bench.compute(DOCUMENT)
    bench.queue.refresh()
    assert bench.pick() == reader and bench.pick() == stranger


keys = st.tuples(st.integers(0, 5), st.integers(0, 5))


@given(changes=st.lists(st.tuples(st.integers(0, 8), st.none() | keys), max_size=60))
def test_lazy_heap_is_a_dictionary_with_a_minimum(
    changes: list[tuple[int, tuple[int, ...] | None]],
) -> None:
    heap, model = LazyHeap(), {}
    for item, key in changes:
        if key is None:
            heap.discard(item)
            model.pop(item, None)
        else:
            heap.place(item, *key)
            model[item] = key
        assert len(heap) == len(model)
        if model:
            assert heap.first() == min(model, key=lambda i: (model[i], i))


def test_lazy_heap_forgets_its_stale_entries() -> None:
    heap, rng = LazyHeap(), np.random.default_rng(0)
    for key in rng.integers(0, 1 << 30, 20_000).tolist():
        heap.place(key % 3, key)
    assert len(heap._entries) < 2000
