"""Reads pages from disk for sequences that wait for them.

A sequence whose prompt goes on on disk waits outside the queue until its pages are there, so it
delays no other. The prefix in memory behind which the pages come is held meanwhile. The pages enter
the tree when the worker has compared all of them with their checksums; the sequence goes back to
the front of the queue, and finds them there. Sequences that need the same page wait together.

Pages are read only if that is faster than to compute them, by the rates of the last reads and
steps. The worker gives up a read that turns out to be slower; then the rest is computed.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from radixrt.messages.cache_explanation import DiskRead
from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.moves import PagesRead, ReadPages, state_part
from radixrt.scheduler.disk.index import NO_SLOT, PageName
from radixrt.scheduler.disk.pages import DiskPages
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.radix.node import Match, Node
from radixrt.scheduler.radix.page_allocator import NO_PAGES, Pages
from radixrt.scheduler.radix.states import NO_ROW
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.step_times import RecentRatio, StepTimes

FIRST_BYTES_A_SECOND = 1e9
"""The rate of a disk of which nothing was read yet."""
FIRST_DELAY_S = 0.002
"""The time of a read beside its bytes, before it is known: the worker begins after its step."""
FORGOTTEN = 0.98
"""Factor of the time of a read whenever one is refused for it: a disk may become faster, which only
reading shows."""
MAX_READS = 4
"""Reads for one sequence, whose pages may be evicted again before it runs."""
NO_LIMIT_S = 1e6
"""The time of steps is not known yet."""


@dataclass(eq=False)
class _Read:
    """An order to read that the worker has not answered."""

    number: int
    root: CacheRoot
    node: Node
    """The pages come behind its end. It is held."""
    names: list[PageName]
    """The names of the pages, and behind them those of the parts of the state that comes along."""
    slots: list[int]
    pages: Pages
    row: int
    """The kept state that is read; NO_ROW: none."""
    ordered: float
    """On the scheduler's clock, as all times."""
    evicted_s_ago: float | None
    waiting: dict[int, Sequence] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)
    """The time from which on each of them waits."""
    is_flushed: bool = False
    """The pages enter the tree only if a sequence waits for them."""


class Reads:
    """The reads under way, and the sequences that wait for them."""

    def __init__(
        self, disk: DiskPages, kv: KVCache, times: StepTimes, clock: Callable[[], float]
    ) -> None:
        self._disk = disk
        self._kv = kv
        self._times = times
        self._clock = clock
        self._under_way: dict[int, _Read] = {}
        self._orders: list[ReadPages] = []
        self._by_slot: dict[int, _Read] = {}
        self._numbers = itertools.count(1)
        self._page_s, self._delay_s = RecentRatio(), RecentRatio()
        self._hopes = 1.0
        """Factor of the time of a read, which falls while none is tried."""
        self.read_pages = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for pages."""
        return sum(len(read.waiting) for read in self._under_way.values())

    @property
    def num_pages(self) -> int:
        """Pages of the pool that are being read."""
        return sum(len(read.pages) for read in self._under_way.values())

    def stats(self) -> dict[str, int]:
        """Its fields of :class:`radixrt.messages.stats.SchedulerStats`."""
        return {"disk_pages_read": self.read_pages}

    def pages(self) -> Pages:
        """These pages, for checks of invariants."""
        held = [read.pages for read in self._under_way.values()]
        return np.concatenate(held) if held else NO_PAGES

    def held_nodes(self) -> list[Node]:
        """The nodes that reads hold, for checks of invariants."""
        return [read.node for read in self._under_way.values()]

    # ------------------------------------------------------------ for sequences

    def begins(self, sequence: Sequence, match: Match | None) -> bool:
        """Let a sequence that is about to be admitted wait for pages from disk, if that is faster.

        Args:
            match: its cached prefix; must not be used any more if this is true.
        """
        if sequence.disk_reads >= MAX_READS or not self._kv.reads_tree(sequence):
            return False
        names, slots = self._on_disk(sequence, match)
        if not slots:
            return False
        if (same := self._by_slot.get(slots[0])) is not None:
            self._wait(sequence, same)
            return True
        count = len(slots)
        if self._kv.states:
            names, slots, count = self._up_to_state(names, slots)
            if not count:
                return False
        depth = self._kv.usable_tokens(match) // self._kv.page_size
        within_s = self._seconds_to_compute(depth, names[0].depth + count - depth)
        if self.seconds(len(slots)) >= within_s:
            self._hopes *= FORGOTTEN
            return False
        return self._order(sequence, match, names, slots, count, within_s)

    def _on_disk(self, sequence: Sequence, match: Match | None) -> tuple[list[PageName], list[int]]:
        """The pages that follow a cached prefix on disk, up to one that another read brings."""
        kv, index = self._kv, self._disk.index
        found = 0 if match is None else match.num_pages
        rest = sequence.cacheable_tokens()[found * kv.page_size :].tobytes()
        self._disk.names.settle()
        last = None
        if match is not None and found:
            last = int(match.node.pages[match.pages_in_edge - 1])
        known = self._disk.names
        self._disk.returns.needed(known.behind(last, sequence.root, rest), index)
        names: list[PageName] = []
        slots: list[int] = []
        for name in known.behind(last, sequence.root, rest):
            slot = index.find(name)
            if slot == NO_SLOT or (slots and slot in self._by_slot):
                break
            names.append(name)
            slots.append(slot)
            if slot in self._by_slot:
                break
        return names, slots

    def _up_to_state(
        self, names: list[PageName], slots: list[int]
    ) -> tuple[list[PageName], list[int], int]:
        """Of consecutive pages on disk, those up to the last one behind which a state is there too,
        with the parts of that state; and the number of the pages."""
        if (states := self._disk.states) is not None:
            for count in range(len(names), 0, -1):
                parts, places = [], []
                for part in states.parts(names[count - 1]):
                    if (place := self._disk.index.find(part)) == NO_SLOT:
                        break
                    parts.append(part)
                    places.append(place)
                else:
                    return names[:count] + parts, slots[:count] + places, count
        return [], [], 0

    def _order(
        self,
        sequence: Sequence,
        match: Match | None,
        names: list[PageName],
        slots: list[int],
        num_pages: int,
        within_s: float,
    ) -> bool:
        """
        Args:
            num_pages: of the names; the others are parts of a state.
        """
        kv, row = self._kv, NO_ROW
        evicted_s_ago = self._evicted_s_ago(match, names[0], sequence.root)
        kv.begin_visit(sequence, match)  # now: with its pages, it comes as if they had been there
        node = kv.tree.hold_match(match, sequence.root)
        count = min(num_pages, kv.num_available)
        if count == num_pages and num_pages < len(names):
            row = kv.states.lend()
        if not count or (row == NO_ROW and num_pages < len(names)):
            kv.tree.let_go(node)
            return False
        if row == NO_ROW:
            names, slots = names[:count], slots[:count]
        self._disk.index.hold(slots)
        pages = kv.allocate(count)
        parts = [state_part(row, number) for number in range(len(names) - count)]
        read = _Read(
            number=next(self._numbers),
            root=sequence.root,
            node=node,
            names=names,
            slots=slots,
            pages=pages,
            row=row,
            ordered=self._clock(),
            evicted_s_ago=evicted_s_ago,
        )
        sequence.disk_reads += 1
        self._wait(sequence, read)
        self._under_way[read.number] = read
        self._by_slot |= dict.fromkeys(slots, read)
        self._orders.append(
            ReadPages(
                number=read.number,
                pages=pack_ids([*pages.tolist(), *parts]),
                slots=pack_ids(slots),
                digests=b"".join(name.digest for name in names),
                checksums=b"".join(map(self._disk.index.checksum, slots)),
                within_s=within_s,
            )
        )
        return True

    def _evicted_s_ago(self, match: Match | None, name: PageName, root: CacheRoot) -> float | None:
        """Seconds since the eviction of the first page that is read."""
        before: int | CacheRoot = root
        if match is not None and match.num_pages:
            before = int(match.node.pages[match.pages_in_edge - 1])
        ghost = self._kv.tree.ghosts.find(before, name.tokens)
        return None if ghost is None else self._clock() - ghost.time

    def _wait(self, sequence: Sequence, read: _Read) -> None:
        read.waiting[sequence.seq_id] = sequence
        read.since[sequence.seq_id] = self._clock()

    def stop_waiting(self, sequence: Sequence) -> bool:
        """A sequence waits no longer; True if it did. The read goes on."""
        return any(
            read.waiting.pop(sequence.seq_id, None) is not None for read in self._under_way.values()
        )

    def must_wait(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether a sequence that would run alone lacks pages that are being read."""
        if not self._under_way:
            return False
        missing = self._kv.pages_for(sequence.num_tokens) - (0 if match is None else match.num_pages)  # fmt: skip
        return missing > self._kv.num_available - self._kv.num_pages_locked_by(match)

    # ------------------------------------------------------------ orders and answers

    def take_orders(self) -> list[ReadPages]:
        """Orders for the workers, which they must get before the plan in the making."""
        orders, self._orders = self._orders, []
        return orders

    def read(self, message: PagesRead) -> list[Sequence]:
        """The pages of an order are there, or can't be had; returns the sequences that have
        waited."""
        read = self._under_way.pop(message.number)
        for slot in read.slots:
            del self._by_slot[slot]
        self._disk.index.let_go(read.slots)
        count = message.num_pages
        if message.is_damaged:
            self._disk.damaged(read.slots[count])
        if read.is_flushed and not read.waiting:
            count = 0
        num_pages = min(count, len(read.pages))
        tokens = unpack_ids(b"".join(name.tokens for name in read.names[:num_pages]))
        depth = read.names[0].depth
        prefix = self._kv.publish_read(read.node, read.root, depth, tokens, read.pages)
        if read.row != NO_ROW:
            is_whole = count == len(read.slots)
            self._kv.states.end_loan(read.row, prefix if is_whole else NO_PAGES, self._kv.page_size)
        self._disk.index.use(name.digest for name in read.names[:count])
        self._learn(read, message)
        self.read_pages += num_pages
        tokens_read, now = num_pages * self._kv.page_size, self._clock()
        for seq_id, sequence in read.waiting.items():
            before = sequence.disk_read or DiskRead(tokens=0, seconds=0.0, evicted_s_ago=read.evicted_s_ago)  # fmt: skip
            sequence.disk_read = DiskRead(
                tokens=before.tokens + tokens_read,
                seconds=before.seconds + now - read.since[seq_id],
                evicted_s_ago=before.evicted_s_ago,
            )
            if count < len(read.slots):  # damaged, or too slow: the rest is computed
                sequence.disk_reads = MAX_READS
        return list(read.waiting.values())

    def _learn(self, read: _Read, message: PagesRead) -> None:
        if message.num_pages and message.seconds > 0:
            self._page_s.observe(message.seconds, message.num_pages)
            waited_s = self._clock() - read.ordered - message.seconds
            self._delay_s.observe(max(0.0, waited_s), 1)
            self._hopes = 1.0

    def flush(self) -> None:
        """Forget the pages that are being read, unless an open request needs them."""
        for read in self._under_way.values():
            read.is_flushed = True

    def seconds(self, num_pages: int) -> float:
        """Forecast of the time to read pages, with those ordered before."""
        page_s = self._page_s.value or self._disk.slot_bytes / FIRST_BYTES_A_SECOND
        delay_s = self._delay_s.value if self._delay_s.is_known else FIRST_DELAY_S
        return self._hopes * ((self.num_pages + num_pages) * page_s + delay_s)

    def _seconds_to_compute(self, depth: int, num_pages: int) -> float:
        size, times = self._kv.page_size, self._times
        if not times.is_known:
            return NO_LIMIT_S
        return times.chunk_seconds(depth * size, num_pages * size)
