"""Writes pages of the KV pool to a file and reads them back, in a thread beside the steps.

A page is one extent of the file: its part of each tensor, layer after layer. A kept state of
recurrent layers is written in parts of the same size, each in the place of a page. What is written is
copied when the order arrives, so that the next step may write to the page. What is read goes into
the pool only after it was compared with its checksum.

Only for CPUs: there, a step is over when its call returns, so the thread and the steps never use
the same pages at a time.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.kv_spec import LayerKV
from radixrt.base.liveness.supervision import start_thread
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.moves import (
    CHECKSUM_BYTES,
    DIGEST_BYTES,
    ClearPages,
    OpenPages,
    PagesRead,
    PagesWritten,
    ReadPages,
    SavePages,
    page_checksum,
    row_and_part,
)

log = logging.getLogger(__name__)

MIN_READ = 8
"""Pages after which a read is given up at the earliest: one says little about the next."""

Moves = OpenPages | ClearPages | SavePages | ReadPages


class PageMover:
    """Moves pages between a pool and a file.

    Args:
        kv_caches: of the pool, on a CPU.
        states: the tables of kept states, [num_states, *shape] each.
        report: takes the answers, in the mover's thread.
        rank: of so many.
    """

    def __init__(
        self,
        kv_caches: list[LayerKV],
        report: Callable[[PagesWritten | PagesRead], None],
        rank: int = 0,
        num_ranks: int = 1,
        states: Sequence[torch.Tensor] = (),
    ) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._tensors = [_as_bytes(one) for layer in kv_caches for one in layer]
        self._states = [_as_bytes(one) for one in states]
        widths = [tensor.shape[1] for tensor in self._tensors]
        self._ends = np.cumsum(widths).tolist()
        self.page_bytes = self._ends[-1] if widths else 0
        self._report = report
        self._fd = -1
        self._reads: deque[ReadPages] = deque()
        self._writes: deque[tuple[SavePages, NDArray[np.uint8]] | ClearPages] = deque()
        self._has_work = threading.Condition()
        start_thread(self._work_on, name="page_mover")

    def take(self, order: Moves) -> None:
        """Take an order between two steps; copies the pages that are to be written."""
        if isinstance(order, OpenPages):
            self._open(order.path, order.num_slots)
            return
        copies = self._copied(unpack_ids(order.pages)) if isinstance(order, SavePages) else None
        with self._has_work:
            if isinstance(order, SavePages):
                assert copies is not None
                self._writes.append((order, copies))
            elif isinstance(order, ClearPages):
                self._writes.append(order)
            else:
                self._reads.append(order)
            self._has_work.notify()

    def _open(self, path: str, num_slots: int) -> None:
        """Open the file; without one, every order fails."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        if self._rank:
            path += f".{self._rank}"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(path, flags, 0o600)
            if os.fstat(self._fd).st_size > num_slots * self.page_bytes:
                os.ftruncate(self._fd, num_slots * self.page_bytes)
        except OSError as error:
            log.error("%s cannot be opened: %s.", path, error.strerror or error)

    def _copied(self, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The bytes of these pages: [n, page_bytes]."""
        copies = np.empty((len(pages), self.page_bytes), dtype=np.uint8)
        start = 0
        for tensor, end in zip(self._tensors, self._ends, strict=True):
            copies[:, start:end] = tensor[np.maximum(pages, 0)]
            start = end
        for index in np.flatnonzero(pages < 0).tolist():
            copies[index] = 0
            for piece, place in self._pieces(int(pages[index])):
                copies[index, place] = piece
        return copies

    def _pieces(self, number: int) -> Iterator[tuple[NDArray[np.uint8], slice]]:
        """The bytes of the tables of states that are a part of a state, and their places in it."""
        row, part = row_and_part(number)
        first, start = part * self.page_bytes, 0
        last = first + self.page_bytes
        for table in self._states:
            end = start + table.shape[1]
            low, high = max(first, start), min(last, end)
            if low < high:
                yield table[row, low - start : high - start], slice(low - first, high - first)
            start = end

    def _work_on(self) -> None:
        """Reads come first: sequences wait for them."""
        while True:
            with self._has_work:
                while not (self._reads or self._writes):
                    self._has_work.wait()
                order = self._reads.popleft() if self._reads else None
                write = None if order is not None else self._writes.popleft()
            if order is not None:
                self._report(self._read(order))
            elif isinstance(write, ClearPages):
                self._clear()
            elif write is not None:
                self._report(self._write(*write))

    # ------------------------------------------------------------ writing

    def _write(self, order: SavePages, copies: NDArray[np.uint8]) -> PagesWritten:
        slots = unpack_ids(order.slots)
        checksums, error = [], ""
        for number, (slot, copy) in enumerate(zip(slots.tolist(), copies, strict=True)):
            try:
                self._write_page(slot, copy)
            except OSError as failure:
                error = failure.strerror or str(failure)
                break
            checksums.append(page_checksum(_part(order.digests, number, DIGEST_BYTES), copy.data))
        done = len(checksums)
        return PagesWritten(
            rank=self._rank,
            slots=pack_ids(slots[:done]),
            checksums=b"".join(checksums),
            failed=pack_ids(slots[done:]),
            error=error,
        )

    def _clear(self) -> None:
        try:
            os.ftruncate(self._fd, 0)
        except OSError as error:
            log.error("The pages of --cache-dir stay on disk: %s.", error.strerror or error)

    def _write_page(self, slot: int, content: NDArray[np.uint8]) -> None:
        done = 0
        while done < self.page_bytes:
            done += os.pwrite(self._fd, content[done:].data, slot * self.page_bytes + done)

    # ------------------------------------------------------------ reading

    def _read(self, order: ReadPages) -> PagesRead:
        pages, slots = unpack_ids(order.pages).tolist(), unpack_ids(order.slots).tolist()
        begin = time.perf_counter()
        self._read_ahead(slots)
        count, is_damaged, error = 0, False, ""
        buffer = np.empty(self.page_bytes, dtype=np.uint8)
        for page, slot in zip(pages, slots, strict=True):
            digest = _part(order.digests, count, DIGEST_BYTES)
            number = count * self._num_ranks + self._rank
            expected = _part(order.checksums, number, CHECKSUM_BYTES)
            try:
                is_whole = (
                    os.preadv(self._fd, [buffer.data], slot * self.page_bytes) == self.page_bytes
                )
            except OSError as failure:
                is_whole, error = False, failure.strerror or str(failure)
            if not is_whole or page_checksum(digest, buffer.data) != expected:
                is_damaged = True
                break
            self._put(page, buffer)
            count += 1
            seconds = time.perf_counter() - begin
            if count >= MIN_READ and seconds > order.within_s * count / len(pages):
                break  # it takes longer than to compute them
        return PagesRead(
            number=order.number,
            rank=self._rank,
            num_pages=count,
            is_damaged=is_damaged,
            seconds=time.perf_counter() - begin,
            error=error,
        )

    def _read_ahead(self, slots: list[int]) -> None:
        """Let the system read all pages while the first ones are checked."""
        with contextlib.suppress(OSError):
            for slot in slots:
                place = slot * self.page_bytes
                os.posix_fadvise(self._fd, place, self.page_bytes, os.POSIX_FADV_WILLNEED)

    def _put(self, page: int, content: NDArray[np.uint8]) -> None:
        if page < 0:
            for piece, place in self._pieces(page):
                piece[:] = content[place]
            return
        start = 0
        for tensor, end in zip(self._tensors, self._ends, strict=True):
            tensor[page] = content[start:end]
            start = end


def _part(packed: bytes, number: int, size: int) -> bytes:
    """One of several strings of bytes of a size."""
    return packed[number * size : (number + 1) * size]


def _as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A tensor as [rows, bytes of a row], over the same memory; of the pool, a row is a page."""
    return tensor.view(torch.uint8).reshape(len(tensor), -1).numpy()
