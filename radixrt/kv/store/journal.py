"""The append-only journal of the pages on disk: which prefix lies in which slot.

A record is a length and a CRC-32 of its content (both little-endian, 32 bits), and the content in
msgpack. The first record is a :class:`Header`; if it is not that of this folder, the journal is
begun anew. The first record that is cut short or does not match its CRC ends the journal, and what
follows is cut off: a process that died while it wrote leaves such a tail.

Records say what *has been* written to the pages, so a journal that misses its last records only
forgets. One that says more than there is does no harm either, because a page is compared with its
checksum before it is used.
"""

import contextlib
import logging
import os
import queue
import struct
import threading
import zlib
from collections.abc import Iterable

import msgspec

from radixrt.base.liveness.supervision import start_thread
from radixrt.kv.store.directory import open_private
from radixrt.messages.ids import ID_BYTES, PackedIds
from radixrt.messages.moves import DIGEST_BYTES

log = logging.getLogger(__name__)

FORM = 1
"""Raised whenever the form of journal or pages changes, so that old ones are not read."""
MAX_RECORD_BYTES = 64 << 20
_FRAME = struct.Struct("<II")


class Header(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """What the journal belongs to."""

    fingerprint: str
    page_size: int
    """Tokens."""
    slot_bytes: int
    """Bytes of a page in the files of pages of all ranks."""
    form: int = FORM
    num_ranks: int = 1


class PagesSaved(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """The pages of consecutive parts of one prefix lie in these slots from now on."""

    before: bytes
    """Digest of the prefix before the first of them: [DIGEST_BYTES]."""
    depth: int
    """Pages of that prefix."""
    tokens: PackedIds
    """Of all pages."""
    slots: PackedIds
    checksums: bytes
    """The :func:`radixrt.messages.moves.page_checksum` of each rank, page by page."""


class PagesDropped(msgspec.Struct, frozen=True, array_like=True, tag="d"):
    """These slots hold nothing from now on."""

    slots: PackedIds


Record = PagesSaved | PagesDropped
_decoder = msgspec.msgpack.Decoder(Header | Record)
_encode = msgspec.msgpack.Encoder().encode


def framed(record: Header | Record) -> bytes:
    """A record as it is in the file."""
    content = _encode(record)
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def read_records(content: bytes) -> tuple[list[Header | Record], int]:
    """The records up to the first one that is damaged, and their length in bytes."""
    records: list[Header | Record] = []
    at = 0
    while at + _FRAME.size <= len(content):
        length, crc = _FRAME.unpack_from(content, at)
        start = at + _FRAME.size
        part = content[start : start + length]
        if length > MAX_RECORD_BYTES or len(part) < length or zlib.crc32(part) != crc:
            break
        try:
            record = _decoder.decode(part)
        except (msgspec.DecodeError, ValueError):
            break
        if not _is_sound(record):
            break
        records.append(record)
        at = start + length
    return records, at


def _is_sound(record: Header | Record) -> bool:
    """Whether a record can be followed: one whose CRC is right may still be forged."""
    if isinstance(record, Header):
        return min(record.page_size, record.slot_bytes, record.num_ranks) >= 1
    if len(record.slots) % ID_BYTES:
        return False
    return isinstance(record, PagesDropped) or (
        record.depth >= 0 and len(record.before) == DIGEST_BYTES
    )


class Journal:
    """Appends records in a thread: a disk that is slow delays nobody. The thread ends at the first
    error, and so does the journal.

    Attributes:
        error: why nothing is written any more; "": it is.
    """

    def __init__(self, folder_fd: int, header: Header) -> None:
        """Open the journal of a folder; :attr:`records` are those that it had.

        Raises:
            OSError: it cannot be opened or written.
        """
        self._folder_fd = folder_fd
        self._header = header
        self.error = ""
        self._fd = open_private("journal", folder_fd)
        self.records: list[Record] = self._begin()
        self._queue: queue.SimpleQueue[tuple[list[Record], bool] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        """Records, and whether they replace all before; an event to be set; None: the end."""
        self._thread = start_thread(self._write_all, name="journal")

    def _begin(self) -> list[Record]:
        """Read the journal, and cut off what cannot be read."""
        size = os.fstat(self._fd).st_size
        found, end = read_records(_read_all(self._fd, size))
        if not found or found[0] != self._header:
            if size:
                log.warning("The journal of --cache-dir is of another form or damaged: begun anew.")
            self._clear()
            return []
        if end < size:
            log.info("Cut %d bytes off the end of the journal of --cache-dir.", size - end)
            os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        return [one for one in found if not isinstance(one, Header)]

    def append(self, records: list[Record]) -> None:
        """Write records soon."""
        if records and not self.error:
            self._queue.put((records, False))

    def replace(self, records: list[Record]) -> None:
        """Let these be all records. None are also tried where nothing can be written: they free
        space."""
        if not (records and self.error):
            self._queue.put((records, True))

    def wait(self) -> None:
        """Until all records so far are written, or the journal has ended."""
        written = threading.Event()
        self._queue.put(written)
        while self._thread.is_alive() and not written.wait(0.05):
            pass

    def close(self) -> None:
        """Write what is left, and end."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._fd)

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            records, is_whole = item
            is_empty = is_whole and not records
            if self.error and not is_empty:
                continue
            try:
                if is_empty:
                    self._clear()
                elif is_whole:
                    self._replace(records)
                else:
                    _write(self._fd, b"".join(map(framed, records)))
            except OSError as error:
                self.error = error.strerror or str(error)
                log.error("--cache-dir: nothing is written any more: %s.", self.error)

    def _clear(self) -> None:
        """Leave no record."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink("journal.new", dir_fd=self._folder_fd)
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        _write(self._fd, framed(self._header))

    def _replace(self, records: Iterable[Record]) -> None:
        """Write a new journal and put it in the place of the old one."""
        fd = open_private("journal.new", self._folder_fd, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            _write(fd, framed(self._header))
            for record in records:
                _write(fd, framed(record))
            os.fsync(fd)
            os.rename(
                "journal.new",
                "journal",
                src_dir_fd=self._folder_fd,
                dst_dir_fd=self._folder_fd,
            )
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink("journal.new", dir_fd=self._folder_fd)
            raise
        os.close(self._fd)
        self._fd = fd


def _read_all(fd: int, size: int) -> bytes:
    parts, at = [], 0
    while at < size and (part := os.pread(fd, min(size - at, 1 << 26), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _write(fd: int, content: bytes) -> None:
    """Write all of it.

    Raises:
        OSError: the disk is full, or broken.
    """
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
