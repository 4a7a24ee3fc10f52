"""Knows the pages on disk, by the prefix that each ends, and gives their slots away.

The digest of a prefix of whole pages is SHA-256 over the digest before its last page and the tokens
of that page; the empty prefix of a tenant and salt has a keyed digest. So a digest names a whole
prefix. Tokens are compared too before a page is used: a digest alone proves nothing.

A page whose prefix is not on disk stays: the prefix may be in memory. Of two pages that were used
last at the same time, the deeper one is dropped first, so prefixes outlive what continues them.
"""

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from radixrt.kv.store.journal import PagesDropped, PagesSaved, Record
from radixrt.messages.ids import ID_BYTES, pack_ids, unpack_ids
from radixrt.messages.moves import CHECKSUM_BYTES
from radixrt.scheduler.radix.key_ids import num_before_invocation

NO_SLOT = -1
MAX_DROPPED = 1 << 16
"""Digests of pages that were dropped for others; some 150 bytes each."""
SMALLEST_REBUILD = 1024
"""Entries of the heap of uses up to which it is never rebuilt."""
MAX_RUN = 4096
"""Pages of one record of the journal."""


class PageName(NamedTuple):
    """The prefix that a page ends."""

    before: bytes
    """Digest of the prefix before the page."""
    depth: int
    """Pages of that prefix."""
    tokens: bytes
    """Packed tokens of the page."""
    digest: bytes
    """Digest of the prefix with the page."""
    is_activated: bool = False
    """An adapter was invoked in the prefix or in the page, whose ids another process cannot know."""


def page_names(
    before: bytes, depth: int, packed: bytes, page_bytes: int, is_activated: bool = False
) -> Iterator[PageName]:
    """The names of the whole pages of packed tokens.

    Args:
        is_activated: the prefix before them is.

    >>> one, two = page_names(b"root", 0, bytes(16), page_bytes=8)
    >>> (one.depth, two.depth), two.before == one.digest
    ((0, 1), True)
    """
    invoked = 0 if is_activated else ID_BYTES * num_before_invocation(packed)
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        tokens = packed[start : start + page_bytes]
        digest = hashlib.sha256(before + tokens).digest()
        yield PageName(before, depth, tokens, digest, start + page_bytes > invoked)
        before, depth = digest, depth + 1


class _Entry(NamedTuple):
    """A page on disk."""

    name: PageName
    checksum: bytes
    """Of each rank's part."""


class DiskIndex:
    """The pages on disk and the free slots.

    Args:
        num_slots: most pages on disk.
        page_bytes: packed tokens of a page.
        num_ranks: each has a checksum of its part of a page.
    """

    def __init__(self, num_slots: int, page_bytes: int, num_ranks: int = 1) -> None:
        self.num_slots = num_slots
        self._page_bytes = page_bytes
        self.checksum_bytes = num_ranks * CHECKSUM_BYTES
        self._slot_of: dict[bytes, int] = {}
        """Slots by digest."""
        self._entries: dict[int, _Entry] = {}
        """By slot."""
        self._used: dict[int, int] = {}
        """The last use of each page, in uses of any page."""
        self._oldest: list[tuple[int, int, int]] = []
        """Heap of last use, negative depth and slot; with stale entries."""
        self._held: dict[int, int] = {}
        """Slots that are being read, and how often."""
        self._dropped: dict[bytes, None] = {}
        """Digests of the pages that were dropped last for others."""
        self._free: list[int] = []
        self._next = 0
        """Slots from here on were never used."""
        self._uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: object) -> bool:
        return digest in self._slot_of

    @property
    def num_slots_touched(self) -> int:
        """Slots at the beginning of the file of pages, behind which nothing was ever written."""
        return self._next

    def find(self, name: PageName) -> int:
        """The slot of a page; NO_SLOT: it is not on disk."""
        slot = self._slot_of.get(name.digest, NO_SLOT)
        if slot != NO_SLOT and self._entries[slot].name != name:
            return NO_SLOT  # equal digests of different tokens
        return slot

    def checksum(self, slot: int) -> bytes:
        return self._entries[slot].checksum

    def use(self, digests: Iterable[bytes]) -> None:
        """These prefixes were used now; those that are not on disk are ignored."""
        self._uses += 1
        for digest in digests:
            if (slot := self._slot_of.get(digest)) is not None:
                self._used[slot] = self._uses

    # ------------------------------------------------------------ slots

    def take_slot(self) -> tuple[int, bool]:
        """A slot for a new page; of a full index, that of the page that was used longest ago.

        Returns:
            The slot (NO_SLOT: all are being read), and whether a page was dropped for it.
        """
        if self._free:
            return self._free.pop(), False
        if self._next < self.num_slots:
            self._next += 1
            return self._next - 1, False
        slot = self._drop_oldest()
        return slot, slot != NO_SLOT

    def _drop_oldest(self) -> int:
        held = []
        while self._oldest:
            entry = heapq.heappop(self._oldest)
            used, depth, slot = entry
            if slot not in self._entries or self._entries[slot].name.depth != -depth:
                continue
            if self._used[slot] != used:
                heapq.heappush(self._oldest, (self._used[slot], depth, slot))
            elif slot in self._held:
                held.append(entry)
            else:
                self._dropped[self._entries[slot].name.digest] = None
                if len(self._dropped) > MAX_DROPPED:
                    del self._dropped[next(iter(self._dropped))]
                self._forget(slot)
                break
        else:
            slot = NO_SLOT
        for entry in held:
            heapq.heappush(self._oldest, entry)
        return slot

    def was_dropped(self, digest: bytes) -> bool:
        """Whether a page was dropped for another one; asked once, it is forgotten."""
        return self._dropped.pop(digest, True) is None

    def free(self, slot: int) -> None:
        """Give a slot back that was taken and holds no page."""
        self._free.append(slot)

    def hold(self, slots: Iterable[int]) -> None:
        """Let nobody else have these slots until :meth:`let_go`."""
        for slot in slots:
            self._held[slot] = self._held.get(slot, 0) + 1

    def let_go(self, slots: Iterable[int]) -> None:
        """End one :meth:`hold`. A slot whose page was dropped meanwhile is free now."""
        for slot in slots:
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]
                if slot not in self._entries:
                    self._free.append(slot)

    # ------------------------------------------------------------ pages

    def add(self, name: PageName, slot: int, checksum: bytes) -> None:
        """A page lies in a slot that was taken for it; its prefix is not on disk yet."""
        assert name.digest not in self._slot_of, "the page is on disk already"
        self._slot_of[name.digest] = slot
        self._entries[slot] = _Entry(name, checksum)
        self._used[slot] = self._uses
        heapq.heappush(self._oldest, (self._uses, -name.depth, slot))
        if len(self._oldest) > 2 * len(self._entries) + SMALLEST_REBUILD:
            self._oldest = [(u, -self._entries[s].name.depth, s) for s, u in self._used.items()]
            heapq.heapify(self._oldest)

    def drop(self, slots: Iterable[int]) -> list[int]:
        """Forget the pages in these slots; returns those that held one."""
        dropped = [slot for slot in slots if slot in self._entries]
        for slot in dropped:
            self._forget(slot)
            if slot not in self._held:
                self._free.append(slot)
        return dropped

    def clear(self) -> None:
        """Forget all pages. The slots that are not held or being written count as never used."""
        self.drop(list(self._entries))
        self._dropped.clear()
        free = set(self._free)
        while self._next - 1 in free:
            self._next -= 1
        self._free = [slot for slot in self._free if slot < self._next]

    def _forget(self, slot: int) -> None:
        entry = self._entries.pop(slot)
        del self._slot_of[entry.name.digest], self._used[slot]

    # ------------------------------------------------------------ the journal

    def replay(self, records: Iterable[Record]) -> None:
        """Take the state that a journal tells. Pages in slots beyond the quota are left out."""
        for record in records:
            if isinstance(record, PagesDropped):
                self.drop(unpack_ids(record.slots).tolist())
            else:
                self._replay_saved(record)
        taken = sorted(self._entries)
        self._next = taken[-1] + 1 if taken else 0
        self._free = [slot for slot in range(self._next) if slot not in self._entries]

    def _replay_saved(self, record: PagesSaved) -> None:
        slots = unpack_ids(record.slots).tolist()
        names = page_names(record.before, record.depth, record.tokens, self._page_bytes)
        sums, size = record.checksums, self.checksum_bytes
        self._uses += 1
        for number, (slot, name) in enumerate(zip(slots, names, strict=False)):
            checksum = sums[number * size : (number + 1) * size]
            if 0 <= slot < self.num_slots and len(checksum) == size:
                if slot in self._entries:
                    self._forget(slot)
                if (old := self._slot_of.get(name.digest)) is not None:
                    self._forget(old)
                self.add(name, slot, checksum)

    def records(self) -> list[Record]:
        """A journal of what there is, the pages that were used longest ago first."""
        return saved_records(self.pages())

    def pages(self) -> list[tuple[PageName, int, bytes]]:
        """Names, slots and checksums, the pages that were used longest ago first."""
        order = sorted(self._entries, key=lambda s: (self._used[s], self._entries[s].name.depth))
        return [(self._entries[slot].name, slot, self.checksum(slot)) for slot in order]


def saved_records(pages: Sequence[tuple[PageName, int, bytes]]) -> list[Record]:
    """The records of pages, their slots and checksums: one for each run of consecutive pages of a
    prefix."""
    runs: list[list[tuple[PageName, int, bytes]]] = []
    for page in pages:
        if runs and runs[-1][-1][0].digest == page[0].before and len(runs[-1]) < MAX_RUN:
            runs[-1].append(page)
        else:
            runs.append([page])
    return [
        PagesSaved(
            before=run[0][0].before,
            depth=run[0][0].depth,
            tokens=b"".join(name.tokens for name, _, _ in run),
            slots=pack_ids([slot for _, slot, _ in run]),
            checksums=b"".join(checksum for _, _, checksum in run),
        )
        for run in runs
    ]
