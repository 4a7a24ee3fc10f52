"""Decides which pages are written to disk, and keeps the journal of those that are there.

A page is written when it is used for the second time or pinned, or when it leaves memory and is
worth it. The worker copies it when the order arrives, so the page may be given away by the next
plan. It counts as being on disk when the worker has written it. Where writing fails, because the
disk is full or broken, it ends: pages that are there are still read.
"""

import errno
import logging
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.kv.store.directory import CacheDirectory, fingerprint_of
from radixrt.kv.store.journal import Header, Journal, PagesDropped, Record
from radixrt.messages.answers import EngineInfo
from radixrt.messages.ids import ID_BYTES, pack_ids, unpack_ids
from radixrt.messages.moves import (
    MAX_STATE_PARTS,
    ClearPages,
    OpenPages,
    PagesWritten,
    SavePages,
    state_part,
)
from radixrt.scheduler.disk.index import NO_SLOT, DiskIndex, PageName, saved_records
from radixrt.scheduler.disk.names import NamedPages
from radixrt.scheduler.disk.returns import MIN_CHANCE, Returns
from radixrt.scheduler.disk.states import DiskStates
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.radix.states import KeptStates

log = logging.getLogger(__name__)

MAX_COPIED_BYTES = 64 << 20
"""Pages that were copied and are not written yet."""
MAX_ORDER_BYTES = 2 << 20
"""Pages of one order that could also be copied later: copying holds up the next step, by half a
millisecond or so."""
MIN_COPIED = 8
"""Pages that may be copied in any case."""
MAX_SLOTS = 1 << 19
"""Most pages on disk; each takes some 600 bytes of the scheduler's memory."""
MAX_WANTED = 1 << 16
"""Pages that wait to be written."""
LOOK_EVERY = 1024
"""Pages that lack room from one look at the folders of others to the next: each takes some 0.1
ms."""
LOOKS_A_QUOTA = 200
"""Looks at the space that others take while the file grows to its full size: each server that
shares the directory may exceed the quota by so small a part."""
_BROKEN_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO}
"""Errors with which a server starts all the same."""
COMPACT_ABOVE = 1024
"""Pages in the journal that are on disk no more, beside as many as are."""


def open_pages(config: ServerConfig, info: EngineInfo, replica: int) -> "DiskPages | None":
    """The pages on disk of a replica; None: there is no ``--cache-dir``, or it cannot be written.

    Raises:
        ConfigError: the directory belongs to another process or is open to others, or is none.
    """
    if config.cache_dir is None:
        return None
    path = Path(config.cache_dir).expanduser()
    try:
        return DiskPages(
            CacheDirectory.own(path, info.kv_parts, replica),
            fingerprint_of(info.kv_parts),
            num_pages=info.kv_pool_tokens // info.page_size,
            page_size=info.page_size,
            slot_bytes=info.kv_bytes_per_token * info.page_size,
            quota_bytes=int(config.cache_dir_gb * 1e9),
            share=1 / max(1, config.dp),
            num_ranks=config.tp,
        )
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno not in _BROKEN_DISK:
            raise ConfigError(f"--cache-dir {path} cannot be used: {reason}.") from error
        log.error("--cache-dir %s is not used: %s.", path, reason)
        return None


class DiskPages:
    """The pages on disk of one replica.

    Args:
        slot_bytes: of a page, over all ranks.
        quota_bytes: for the pages of this replica.
        share: of the quota of the whole directory that this replica may fill.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        fingerprint: str,
        *,
        num_pages: int,
        page_size: int,
        slot_bytes: int,
        quota_bytes: int,
        share: float = 1.0,
        num_ranks: int = 1,
    ) -> None:
        """
        Raises:
            OSError: the journal cannot be opened.
        """
        self.directory = directory
        self._quota_bytes, self._share = quota_bytes, share
        self.slot_bytes = slot_bytes
        self._own_slots = min(int(quota_bytes * share) // slot_bytes, MAX_SLOTS)
        self._measured_slots = 0
        """Slots that may be in use before the space that others take is measured again."""
        self.names = NamedPages(
            num_pages, page_size, lambda root: directory.root_digest(root.packed())
        )
        self.index = DiskIndex(0, ID_BYTES * page_size, num_ranks)
        self._measure()
        self.header = Header(fingerprint, page_size, slot_bytes, num_ranks=num_ranks)
        self._journal = Journal(directory.fd, self.header)
        self.index.replay(self._journal.records)
        self._journal.records = []
        self._measure()
        self._journaled = len(self.index)
        """Pages in the journal, with those that are on disk no more."""
        self._wanted: deque[tuple[int, PageName]] = deque()
        self._leaving: list[tuple[int, PageName]] = []
        """Pages that left memory in the plan in the making."""
        self._worth: set[int] = set()
        """Pages in memory that were used twice or pinned."""
        self._answers: set[int] = set()
        """Pages in memory with tokens that were generated."""
        self._writing: dict[int, PageName | None] = {}
        """The pages that are being written, by slot. None: the page was forgotten meanwhile."""
        self._being_written: set[bytes] = set()
        self._max_copied = max(MIN_COPIED, MAX_COPIED_BYTES // slot_bytes)
        self._max_ordered = max(1, MAX_ORDER_BYTES // slot_bytes)
        self.states: DiskStates | None = None
        """The states of recurrent layers; None: the model has none."""
        self.returns = Returns(int(quota_bytes * share) // slot_bytes)
        self.min_chance = MIN_CHANCE
        """Of a return, from which on a page is written that was used once."""
        self.ids_are_tokens = True
        """Ids beyond all vocabularies are those of activated adapters. In a simulation they are
        not."""
        self._is_open = self._is_cleared = False
        self.error = ""
        """Why nothing is written any more."""
        self.written_pages = self.dropped_pages = self.damaged_pages = 0
        self._lacking = self._next_look = 0
        """Pages that lacked room so far, and those after which to look for a folder to remove."""

    def keep_states(self, kept: KeptStates, state_bytes: int) -> None:
        """Write states of recurrent layers, too.

        Args:
            state_bytes: of one, over all ranks.
        """
        num_parts = -(-state_bytes // self.slot_bytes)
        if kept and num_parts <= MAX_STATE_PARTS:
            self.states = DiskStates(kept, num_parts)

    def close(self) -> None:
        """Write what is left to the journal, and give the directory up."""
        self._journal.close()
        self.directory.close()

    def _measure(self) -> None:
        """Let the file grow as far as others leave room in the quota of the whole directory now."""
        left = (self._quota_bytes - self.directory.bytes_of_others()) // self.slot_bytes
        touched = self.index.num_slots_touched
        self.index.num_slots = max(min(self._own_slots, left), touched)
        self._measured_slots = touched + max(1, self._own_slots // LOOKS_A_QUOTA)

    # ------------------------------------------------------------ what happens to pages in memory

    def begin_plan(self) -> None:
        self.names.begin_plan()

    def used(self, pages: Pages) -> None:
        """These pages of a prefix were used for the second time, or pinned."""
        self.names.settle()
        digests = []
        for page in pages.tolist():
            name = self.names.name(page)
            assert name is not None, "a page without a name was in the tree"
            digests.append(name.digest)
            if page not in self._worth:
                self._worth.add(page)
                if not self._is_there(name) and len(self._wanted) < MAX_WANTED:
                    self._wanted.append((page, name))
        self.index.use(digests + self._used_state(pages))

    def _used_state(self, pages: Pages) -> list[bytes]:
        """The state from which a prefix goes on was used, too; returns the digests of its parts."""
        if self.states is None or (last := self.states.of_prefix(pages)) is None:
            return []
        page = int(pages[last])
        name = self.names.name(page)
        assert name is not None, "a page without a name was in the tree"
        parts = list(self.states.parts(name))
        if not all(map(self._is_there, parts)):
            self.states.want(page, name)
        return [part.digest for part in parts]

    def answered(self, pages: Pages) -> None:
        """These pages, which have just entered the tree, hold tokens that were generated."""
        self._answers.update(pages.tolist())

    def evicted(self) -> None:
        """The pages that have just left the tree were evicted: those that are worth it are written
        before they have a new owner."""
        for page, name in self.names.removed_last:
            is_kept = self._is_there(name) or self._leaves(page, name)
            if is_kept and self.states is not None:
                self.states.leaves(page, name)
        self.forget_removed()

    def _leaves(self, page: int, name: PageName) -> bool:
        """Whether a page that leaves memory, and is not on disk, is worth being written."""
        is_answer = page in self._answers
        self.returns.left(name, is_answer)
        if not self.names.is_computed(page):
            return False
        if page in self._worth or self._is_worth(name, is_answer):
            self._leaving.append((page, name))
            return True
        return False

    def _is_worth(self, name: PageName, is_answer: bool) -> bool:
        """Whether a page that was used once in memory is written when it leaves. One that
        was dropped from disk for others has to return once more before."""
        if self.returns.chance(name, is_answer) < self.min_chance:
            return False
        return not (self.index.was_dropped(name.digest) and self.min_chance)

    def forget_removed(self) -> None:
        """The pages that have just left the tree are not written."""
        for page, _ in self.names.removed_last:
            self._worth.discard(page)
            self._answers.discard(page)
        self.names.removed_last = []

    def _is_there(self, name: PageName) -> bool:
        return name.digest in self.index or name.digest in self._being_written

    # ------------------------------------------------------------ writing

    def take_order(self) -> OpenPages | ClearPages | SavePages | None:
        """The next order for the workers, which they must get before the plan in the making; None:
        there is none."""
        if not self._is_open:
            self._is_open = True
            path = str(self.directory.path / "pages")
            return OpenPages(path=path, num_slots=self.index.num_slots_touched)
        if self._is_cleared:
            self._is_cleared = False
            return ClearPages()
        leaving, self._leaving = self._leaving, []
        states = [] if self.states is None else self.states.take_leaving()
        if self.error:
            return None
        pages: list[int] = []
        slots: dict[int, PageName] = {}
        for row, name in states:
            self._add_state(row, name, pages, slots)
        for page, name in leaving:
            if len(self._writing) < self._max_copied and (slot := self.take(name)) is not None:
                pages.append(page)
                slots[slot] = name
        while self._wanted and len(pages) < self._max_ordered and len(self._writing) < self._max_copied:  # fmt: skip
            page, name = self._wanted[0]
            if self.names.name(page) is name:
                if not self.names.is_computed(page):
                    break
                if (slot := self.take(name)) is not None:
                    pages.append(page)
                    slots[slot] = name
            self._wanted.popleft()
        if self.states is not None and not pages:  # one at a time: copying holds up the next step
            for page, row, name in self.states.wanted():
                is_gone = self.names.name(page) is not name
                if pages or not (is_gone or self._add_state(row, name, pages, slots)):
                    break
        digests = b"".join(name.digest for name in slots.values())
        order = SavePages(pages=pack_ids(pages), slots=pack_ids(list(slots)), digests=digests)
        return order if pages else None

    def _add_state(
        self, row: int, name: PageName, pages: list[int], slots: dict[int, PageName]
    ) -> bool:
        """Add the parts of a kept state to an order that are not on disk; False: too much is being
        written already."""
        assert self.states is not None
        if self._writing and len(self._writing) + self.states.num_parts > self._max_copied:
            return False
        if self.ids_are_tokens and name.is_activated:
            return True
        for number, part in enumerate(self.states.parts(name)):
            if (slot := self.take(part)) is not None:
                pages.append(state_part(row, number))
                slots[slot] = part
        return True

    def take(self, name: PageName) -> int | None:
        """A slot for a page, which is written now; None: it is there already, there is no room, or
        no other process could use it."""
        if self._is_there(name) or (self.ids_are_tokens and name.is_activated):
            return None
        if self.index.num_slots_touched >= self._measured_slots:
            self._measure()
        slot, is_dropped = self.index.take_slot()
        if is_dropped:
            self._drop([slot])
        is_full = is_dropped or slot == NO_SLOT
        if is_full and self._finds_room() and slot == NO_SLOT:
            slot, _ = self.index.take_slot()
        if slot == NO_SLOT:
            return None
        self._writing[slot] = name
        self._being_written.add(name.digest)
        return slot

    def _finds_room(self) -> bool:
        """Look for room for further pages: remove a folder that nobody uses, or find that others
        have shrunk."""
        self._lacking += 1
        if self._lacking <= self._next_look:
            return False
        if not self.directory.drop_oldest(round(1 / self._share)):
            self._next_look = self._lacking + LOOK_EVERY
        self._measure()
        return self.index.num_slots > self.index.num_slots_touched

    def written(self, message: PagesWritten) -> None:
        """Note what the worker has written."""
        done, size = [], self.index.checksum_bytes
        for number, slot in enumerate(unpack_ids(message.slots).tolist()):
            if (name := self._end_of_write(slot)) is None:
                continue
            checksum = message.checksums[number * size : (number + 1) * size]
            self.index.add(name, slot, checksum)
            done.append((name, slot, checksum))
        for slot in unpack_ids(message.failed).tolist():
            if self._end_of_write(slot) is not None:
                self.index.free(slot)
        if message.error and not self.error:
            self._stop(message.error)
        self.written_pages += len(done)
        self._note(saved_records(done), len(done))

    def _end_of_write(self, slot: int) -> PageName | None:
        """The page that was written to a slot; None: it was forgotten meanwhile."""
        if (name := self._writing.pop(slot)) is None:
            self.index.free(slot)
        else:
            self._being_written.discard(name.digest)
        return name

    def stats(self) -> dict[str, int]:
        """Its fields of :class:`radixrt.messages.stats.SchedulerStats`."""
        return {
            "disk_pages": len(self.index),
            "disk_pages_written": self.written_pages,
            "disk_pages_dropped": self.dropped_pages,
            "disk_pages_damaged": self.damaged_pages,
            "disk_stopped": int(bool(self.error)),
        }

    def _stop(self, error: str) -> None:
        log.error("--cache-dir: nothing is written any more: %s.", error)
        self.error = error
        self._wanted.clear()

    # ------------------------------------------------------------ dropping

    def damaged(self, slot: int) -> None:
        """The page in this slot is not what was written."""
        self.damaged_pages += 1
        self._drop(self.index.drop([slot]))

    def flush(self) -> None:
        """Forget all pages on disk, and those that have just left the tree. What stays in memory is
        written when it is used again."""
        self._wanted.clear()
        self._leaving.clear()
        self._worth.clear()
        self._being_written.clear()
        if self.states is not None:
            self.states.clear()
        self.forget_removed()
        self._writing = dict.fromkeys(self._writing)
        self.dropped_pages += len(self.index)
        self.index.clear()
        self._journal.replace([])
        self._journaled = 0
        self._is_cleared = True
        self._measured_slots = 0

    def _drop(self, slots: Iterable[int]) -> None:
        if dropped := list(slots):
            self.dropped_pages += len(dropped)
            self._note([PagesDropped(pack_ids(dropped))], 0)

    def _note(self, records: list[Record], num_pages: int) -> None:
        """Write records to the journal, or a new journal if most of it is outdated."""
        if self._journal.error and not self.error:
            self.error = self._journal.error
        self._journaled += num_pages
        if self._journaled > 2 * len(self.index) + COMPACT_ABOVE:
            self._journal.replace(self.index.records())
            self._journaled = len(self.index)
        else:
            self._journal.append(records)
