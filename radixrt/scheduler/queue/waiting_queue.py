"""Who is admitted next.

Prefixes are matched when a sequence arrives. Afterwards two things keep the order true without looking at
everyone in every step: an insertion into the tree tells whose prefix may have grown
(:mod:`radixrt.scheduler.queue.prefix_watch`), and whoever is about to be picked is looked up once more, because
eviction can only have made its prefix shorter, and so its place worse.
"""

from dataclasses import dataclass
from itertools import islice

from radixrt.scheduler.lazy_heap import LazyHeap
from radixrt.scheduler.queue.prefix_watch import MissingPage, PrefixWatch
from radixrt.scheduler.queue.queue_order import QueueOrder
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.radix.tree import Match
from radixrt.scheduler.sequence import Sequence

LOOKUPS_PER_STEP = 8
TOKENS_PER_STEP = 1 << 17
"""Prompt tokens compared in those lookups. Both bound the time of a step; the rest has to wait for the next."""

NEXT_IN_LINE, LOOKUPS_IN_LINE = 16, 2
"""Of so many of the oldest, so many are looked up in each step, where the eviction policy cares who waits."""

LOOKUPS_PER_PICK = 8
"""If so many in a row turn out to have lost their prefix, the best one known by then is picked."""


@dataclass(eq=False, slots=True)
class _Waiting:
    sequence: Sequence
    retracted: bool
    num_cached: int = -1
    """Pages of its prefix when last looked up."""
    lacks: MissingPage | None = None


class WaitingQueue:
    """Sequences that wait for a slot, in the order of a policy; retracted ones go before others of their rank."""

    def __init__(self, order: QueueOrder, kv: KVCache) -> None:
        self.order = order
        self._kv = kv
        self._waiting: dict[int, _Waiting] = {}
        self._best = LazyHeap()
        self._oldest = LazyHeap()
        self._watch = PrefixWatch()
        self._picks = 0
        self._next_in_line: list[int] = []
        self._watches = order.depends_on_cache or kv.awaited is not None
        """Whether anybody wants to know the prefixes of those who wait."""
        if self._watches:
            kv.on_growth = self._watch.inserted

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, *, retracted: bool = False) -> None:
        """Let a sequence wait: one that has just arrived, or one that had to give up its slot."""
        waiting = self._waiting[sequence.seq_id] = _Waiting(sequence, retracted)
        rank = self.order.rank(sequence)
        self._oldest.place(sequence.seq_id, rank, not retracted)
        if self._watches:
            self._look_up(waiting)

    def remove(self, seq_id: int) -> None:
        """Take a sequence out of turn; does nothing if it does not wait here."""
        waiting = self._waiting.pop(seq_id, None)
        if waiting is None:
            return
        if self._kv.awaited is not None:
            self._kv.awaited.forget(seq_id)
        self._best.discard(seq_id)
        self._oldest.discard(seq_id)
        if waiting.lacks is not None:
            self._watch.discard(seq_id, waiting.lacks)

    def refresh(self) -> None:
        """Once a step: look those up anew whose prefix has grown, a bounded number at a time."""
        lookups, tokens = LOOKUPS_PER_STEP, TOKENS_PER_STEP
        while lookups > 0 and tokens > 0 and (seq_id := self._watch.take_outdated()) is not None:
            waiting = self._waiting.get(seq_id)
            if waiting is not None:
                self._look_up(waiting)
                lookups -= 1
                tokens -= waiting.num_cached * self._kv.page_size
        if self._kv.awaited is not None:
            self._refresh_awaited(self._kv.awaited.evicted)

    def _refresh_awaited(self, evicted: dict[int, None]) -> None:
        """Look up anew whose prefix was evicted, and a few of the oldest in turn: eviction is to spare their prefixes,
        and where those end changes when others cut or join the edges there."""
        if not self._next_in_line:
            self._next_in_line = [*islice(self._waiting, NEXT_IN_LINE)]
        again = [*islice(evicted, LOOKUPS_IN_LINE)]
        for seq_id in again:
            del evicted[seq_id]
        again += self._next_in_line[-LOOKUPS_IN_LINE:]
        del self._next_in_line[-LOOKUPS_IN_LINE:]
        for seq_id in again:
            waiting = self._waiting.get(seq_id)
            if waiting is not None:
                self._look_up(waiting)

    def head(self) -> tuple[Sequence, Match | None]:
        """Whose turn it is, and its cached prefix; the queue must not be empty."""
        if self._picks % self.order.oldest_every == self.order.oldest_every - 1:
            sequence = self._waiting[self._oldest.first()].sequence
            return sequence, self._kv.find_prefix(sequence)
        for _ in range(LOOKUPS_PER_PICK):
            waiting = self._waiting[self._best.first()]
            match = self._kv.find_prefix(waiting.sequence)
            self._place(waiting, match)
            if self._best.first() == waiting.sequence.seq_id:
                break
        return waiting.sequence, match

    def pop(self, sequence: Sequence) -> None:
        """Remove the head, which has been admitted."""
        if not self._waiting[sequence.seq_id].retracted:
            self._picks += 1
        self.remove(sequence.seq_id)

    def _look_up(self, waiting: _Waiting) -> None:
        match = self._kv.find_prefix(waiting.sequence)
        self._place(waiting, match)
        if match is not None:
            self._kv.expect(waiting.sequence, match)

    def _place(self, waiting: _Waiting, match: Match | None) -> None:
        """Note how long a sequence's cached prefix is, and put it where it belongs therefore."""
        sequence, num_cached = waiting.sequence, 0 if match is None else match.num_pages
        if num_cached != waiting.num_cached:
            waiting.num_cached = num_cached
            self._best.place(sequence.seq_id, *self._key(waiting))
            if waiting.lacks is not None:
                self._watch.discard(sequence.seq_id, waiting.lacks)
            waiting.lacks = self._kv.page_lacked(sequence, num_cached)
        if waiting.lacks is not None:
            self._watch.add(sequence.seq_id, waiting.lacks)

    def _key(self, waiting: _Waiting) -> tuple[int, bool, int]:
        """What decides before age. Retracted sequences keep to the order of their arrival: they have been
        picked before."""
        sequence, order = waiting.sequence, self.order
        cost = order.cost(sequence, waiting.num_cached * self._kv.page_size)
        return order.rank(sequence), not waiting.retracted, 0 if waiting.retracted else cost
