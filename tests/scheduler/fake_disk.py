"""The part of a worker without a model that moves pages between its memory and a disk, which is a
dictionary."""

import hashlib
from collections import deque

import msgspec

from radixrt.messages.ids import unpack_ids
from radixrt.messages.moves import (
    ClearPages,
    OpenPages,
    PagesRead,
    PagesWritten,
    ReadPages,
    SavePages,
    row_and_part,
)
from tests.scheduler.fake_worker import FakeWorker

GARBAGE = -1
"""Stands in a page that is being read."""


def checksum(digest: bytes, content: bytes) -> bytes:
    return hashlib.sha256(digest + content).digest()[:16]


def _digest(order: SavePages | ReadPages, number: int) -> bytes:
    return order.digests[32 * number : 32 * number + 32]


class FakeDisk:
    """Copies a page that is saved at once, and answers orders when it is told to.

    Attributes:
        slots: the disk; it may be changed, and outlives the worker.
        is_full: nothing more can be written.
        most_read: pages of an order that are read before the worker gives up.
    """

    def __init__(self, worker: FakeWorker, slots: dict[int, bytes] | None = None) -> None:
        self._worker = worker
        self.slots = {} if slots is None else slots
        self.is_full = False
        self.most_read = 1 << 30
        self._read_states: dict[int, int] = {}
        """The states of the order that is read, by row."""
        self._orders: deque[tuple[ClearPages | SavePages | ReadPages, list[bytes]]] = deque()

    def take(self, order: object) -> None:
        match order:
            case SavePages():
                self._orders.append(
                    (order, [self._page(p) for p in unpack_ids(order.pages).tolist()])
                )
            case ReadPages():
                for page in unpack_ids(order.pages).tolist():
                    self._fill(page, [GARBAGE] * max(2, self._worker.page_size))
                self._orders.append((order, []))
            case ClearPages():
                self._orders.append((order, []))
            case _:
                assert isinstance(order, OpenPages)

    def _page(self, page: int) -> bytes:
        if page < 0:
            row, part = row_and_part(page)
            return msgspec.msgpack.encode([self._worker.kept[row], part])
        places = [(page, place) for place in range(self._worker.page_size)]
        return msgspec.msgpack.encode([self._worker.memory[place] for place in places])

    def _fill(self, page: int, values: list[int]) -> None:
        """Fill a page. A state is there when its order is read to the end."""
        if page < 0:
            row, part = row_and_part(page)
            assert part == values[1] or values[0] == GARBAGE, "a part in the place of another"
            self._read_states[row] = values[0]
            self._worker.kept[row] = GARBAGE
            return
        for place, value in enumerate(values):
            self._worker.memory[page, place] = value

    def work(self) -> PagesWritten | PagesRead | None:
        """The answer to the oldest order; None: there is none."""
        if not self._orders:
            return None
        order, copies = self._orders.popleft()
        if isinstance(order, ClearPages):
            self.slots.clear()
            return self.work()
        return self._write(order, copies) if isinstance(order, SavePages) else self._read(order)

    def _write(self, order: SavePages, copies: list[bytes]) -> PagesWritten:
        if self.is_full:
            return PagesWritten(slots=b"", checksums=b"", failed=order.slots, error="disk is full")
        for slot, content in zip(unpack_ids(order.slots).tolist(), copies, strict=True):
            self.slots[slot] = content
        return PagesWritten(
            slots=order.slots,
            checksums=b"".join(checksum(_digest(order, n), copy) for n, copy in enumerate(copies)),
        )

    def _read(self, order: ReadPages) -> PagesRead:
        pages, slots = unpack_ids(order.pages).tolist(), unpack_ids(order.slots).tolist()
        self._read_states = {}
        for number, (page, slot) in enumerate(zip(pages, slots, strict=True)):
            expected = order.checksums[16 * number : 16 * number + 16]
            content = self.slots.get(slot, b"")
            if number >= self.most_read or checksum(_digest(order, number), content) != expected:
                is_damaged = number < self.most_read
                return PagesRead(
                    number=order.number, num_pages=number, is_damaged=is_damaged, seconds=1e-6
                )
            self._fill(page, msgspec.msgpack.decode(content))
        self._worker.kept |= self._read_states
        return PagesRead(number=order.number, num_pages=len(pages), seconds=1e-6)
