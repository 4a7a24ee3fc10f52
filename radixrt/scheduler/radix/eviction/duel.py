"""Two policies duel in sampled shadow caches; the winner rules the pool.

LRU is hard to beat where memory is ample and easy to beat where it is short: then everything is evicted before
anybody returns, and it pays to keep those who return soonest and let newcomers go. *Return hazard* does that: it
evicts the page whose return is least likely for each second that it would stay, with likelihoods that it learns
(:mod:`radixrt.scheduler.radix.eviction.return_hazards`). It can learn wrongly. So both run in shadow on a sample of the pages
(set dueling: Qureshi et al., 2007), and whichever finds more there decides what the pool evicts.
"""

from collections.abc import Callable
from dataclasses import dataclass

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.eviction.leaf_heap import LeafHeap
from radixrt.scheduler.radix.eviction.page_sample import PageSample
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy, Use
from radixrt.scheduler.radix.eviction.return_hazards import NUM_CLASSES, ReturnHazards
from radixrt.scheduler.radix.eviction.shadow_cache import ShadowCache, Stack
from radixrt.scheduler.radix.eviction.visit_history import Visit, VisitHistory
from radixrt.scheduler.radix.node import Node

SHADOW_PAGES = 4096
"""Size of a shadow cache, or up to twice that; bounds memory and time a request, whatever the pool's size."""

HISTORY_POOLS = 64
"""How far back returns are seen: pools' worth of pages."""

FIT_EVERY, FIRST_FIT = 256, 32
"""Requests from one fit of the hazards to the next; at the start more often, to get going."""

MEMORY = 0.999
"""What a duel's score keeps from request to request: half of it after 700."""

MIN_LEAD = 8
"""Pages that return hazard has to be ahead of LRU in any case."""

LEAD, LEAD_TO_BEGIN = 0.01, 1.05
"""Return hazard rules while what it finds and LRU misses is more than what LRU finds and it misses, by this share of
all that LRU finds; to take over, LRU's part counts LEAD_TO_BEGIN times, and a shadow is not the pool to the last page."""


@dataclass(eq=False, slots=True)
class _DuelUse(Use):
    """A request, in the history and in both shadows."""

    visit: Visit
    in_lru: Stack
    in_hazard: Stack


class ReturnHazardQueue:
    """The evictable leaves, by class of odds, with the oldest and the newest of each at hand.

    The index changes with time, and every leaf's changes with it; within a class it falls with age, or rises to the time of the
    usual pause and falls then. So the least is at one end, and a handful of candidates is enough.
    """

    def __init__(self) -> None:
        self._oldest = [LeafHeap() for _ in range(NUM_CLASSES)]
        self._newest = [LeafHeap() for _ in range(NUM_CLASSES)]

    def push(self, leaf: Node) -> None:
        kind = leaf.traffic_class
        self._oldest[kind].push(leaf.stamp, leaf)
        self._newest[kind].push(-leaf.stamp, leaf)

    def pop_oldest(self) -> Node | None:
        return self._pop_first(self._oldest, lambda leaf: (0.0, leaf.stamp))

    def pop_least_likely(self, hazards: ReturnHazards, now: float) -> Node | None:
        """The leaf with the smallest index, older ones first among equals."""

        def order(leaf: Node) -> tuple[float, int]:
            age_s = max(0.0, now - leaf.stamp * 1e-9)
            return hazards.index(leaf.traffic_class, age_s), leaf.stamp

        return self._pop_first([*self._oldest, *self._newest], order)

    def _pop_first(
        self, heaps: list[LeafHeap], order: Callable[[Node], tuple[float, int]]
    ) -> Node | None:
        """A leaf that is also in another heap stays there until it has changed; the tree takes or offers it."""
        tops = [(leaf, heap) for heap in heaps if (leaf := heap.peek()) is not None]
        if not tops:
            return None
        return min(tops, key=lambda top: order(top[0]))[1].pop()


class Duel(EvictionPolicy):
    """LRU, unless return hazard has found more of late in a shadow of the pool."""

    def __init__(self, num_pages: int, page_size: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        one_in = 1 << max(0, (num_pages // SHADOW_PAGES).bit_length() - 1)
        self._sample = PageSample(page_size, one_in)
        shadow_pages = max(1, num_pages // one_in)
        self._hazards = ReturnHazards()
        self._history = VisitHistory(HISTORY_POOLS * shadow_pages)
        self._lru = ShadowCache(shadow_pages, 1, lambda ends: ends[0])
        self._hazard = ShadowCache(shadow_pages, NUM_CLASSES, self._least_likely)
        self._found_by_lru = self._only_lru = self._only_hazard = 0.0
        self._num_seen, self._next_fit = 0, FIRST_FIT
        self.hazard_rules = False
        self._leaves = ReturnHazardQueue()

    # ------------------------------------------------------------ the pool

    def offer(self, leaf: Node) -> None:
        self._leaves.push(leaf)

    def pop(self) -> Node | None:
        if self.hazard_rules:
            return self._leaves.pop_least_likely(self._hazards, self._clock())
        return self._leaves.pop_oldest()

    # ------------------------------------------------------------ the shadows

    def observe(self, tokens: TokenIds, salt: str) -> Use:
        pages = self._sample.pick(tokens, salt)
        now = self._clock()
        self._judge(self._lru.num_found(pages), self._hazard.num_found(pages))
        self._fit_if_due(now)
        visit = self._history.begin(pages, len(tokens), now)
        kind = self._hazards.classify(visit.features)
        return _DuelUse(
            kind, visit, self._lru.use(pages, 0, now), self._hazard.use(pages, kind, now)
        )

    def observe_end(self, use: Use, num_output: int) -> None:
        assert isinstance(use, _DuelUse)
        now = self._clock()
        self._history.end(use.visit, num_output, now)
        use.kind = self._hazards.classify(use.visit.features)
        self._lru.use_again(use.in_lru, 0, now)
        self._hazard.use_again(use.in_hazard, use.kind, now)

    def _fit_if_due(self, now: float) -> None:
        self._num_seen += 1
        if self._num_seen < self._next_fit:
            return
        self._next_fit = self._num_seen + min(FIT_EVERY, max(FIRST_FIT, self._num_seen // 8))
        seen = self._history.observations(now)
        if seen is not None:
            self._hazards.fit(seen)

    def _judge(self, found_by_lru: int, found_by_hazard: int) -> None:
        """Only what one of them finds and the other does not counts."""
        self._found_by_lru = MEMORY * self._found_by_lru + found_by_lru
        self._only_lru = MEMORY * self._only_lru + max(0, found_by_lru - found_by_hazard)
        self._only_hazard = MEMORY * self._only_hazard + max(0, found_by_hazard - found_by_lru)
        to_beat = self._only_lru * (1.0 if self.hazard_rules else LEAD_TO_BEGIN)
        self.hazard_rules = self._only_hazard > to_beat + max(LEAD * self._found_by_lru, MIN_LEAD)

    def _least_likely(self, ends: list[Stack]) -> Stack:
        now = self._clock()
        return min(ends, key=lambda e: (self._hazards.index(e.kind, now - e.time_s), e.time_s))
