"""Who is admitted next."""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

from radixrt.scheduler.radix_tree import RadixTree
from radixrt.scheduler.sequence import Sequence

OLDEST_EVERY = 4
"""Every so many picks the oldest goes first, so that nobody starves. On real traces a mixing ratio keeps
the whole gain of prefix order, where a bound on the wait in seconds decays into first come first served."""

REFRESH_PER_STEP = 64
"""Waiting sequences looked up anew in one step after the tree has changed; bounds the planning time."""


class WaitingQueue:
    """Sequences that wait for a slot: retracted ones first, then in the policy's order."""

    def __init__(self, policy: Literal["lpm", "fcfs"], tree: RadixTree) -> None:
        self._by_prefix = policy == "lpm"
        self._tree = tree
        self._retracted: dict[int, Sequence] = {}
        self._arrived: dict[int, Sequence] = {}
        self._cached_pages: dict[int, int] = {}
        self._stale: dict[int, None] = {}
        self._generation = tree.generation
        self._picks = 0

    def __len__(self) -> int:
        return len(self._retracted) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._retracted.values()
        yield from self._arrived.values()

    def add(self, sequence: Sequence) -> None:
        """Append a sequence that has just arrived."""
        self._arrived[sequence.seq_id] = sequence
        if self._by_prefix:
            self._cached_pages[sequence.seq_id] = self._lookup(sequence)

    def add_retracted(self, sequence: Sequence) -> None:
        """Put back a sequence that had to give up its slot; oldest first among its like."""
        self._retracted[sequence.seq_id] = sequence
        self._retracted = dict(sorted(self._retracted.items()))

    def remove(self, seq_id: int) -> Sequence | None:
        """Take a sequence out of turn; None if it does not wait here."""
        self._cached_pages.pop(seq_id, None)
        self._stale.pop(seq_id, None)
        return self._retracted.pop(seq_id, None) or self._arrived.pop(seq_id, None)

    def refresh(self) -> None:
        """Once a step: bring prefix lengths up to date with the tree, a bounded number at a time."""
        if not self._by_prefix:
            return
        if self._generation != self._tree.generation:
            self._generation = self._tree.generation
            self._stale.update(dict.fromkeys(self._arrived))
        for seq_id in list(islice(self._stale, REFRESH_PER_STEP)):
            del self._stale[seq_id]
            self._cached_pages[seq_id] = self._lookup(self._arrived[seq_id])

    def _lookup(self, sequence: Sequence) -> int:
        if not sequence.reads_cache:
            return 0
        match = self._tree.match(sequence.known_tokens(), sequence.salt)
        return 0 if match is None else match.num_pages

    def head(self) -> Sequence:
        """Whose turn it is; the queue must not be empty. Asking twice gives the same answer."""
        if self._retracted:
            return next(iter(self._retracted.values()))
        oldest_turn = self._picks % OLDEST_EVERY == OLDEST_EVERY - 1
        if not self._by_prefix or oldest_turn:
            return next(iter(self._arrived.values()))
        return self._arrived[max(self._arrived, key=self._cached_pages.__getitem__)]

    def pop(self, sequence: Sequence) -> None:
        """Remove the head, which has been admitted."""
        if sequence.seq_id not in self._retracted:
            self._picks += 1
        self.remove(sequence.seq_id)
