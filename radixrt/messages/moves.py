"""The messages that move KV pages between memory and disk: orders for the workers, and their
answers.

They travel on the links of plans and results and keep the order of these. A page that a plan gives
to a new owner is therefore copied before, if its order was sent before that plan; and no step that
was planned earlier writes to a page that is being read. A step plan itself knows nothing of all
this.
"""

import hashlib
from typing import Any

from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message

DIGEST_BYTES, CHECKSUM_BYTES = 32, 16
MAX_STATE_PARTS = 1 << 12


def state_part(row: int, part: int) -> int:
    """What stands in the place of a page for a part of a kept state of recurrent layers. Parts have
    the size of a page.

    >>> row_and_part(state_part(3, 7))
    (3, 7)
    """
    return -1 - (row * MAX_STATE_PARTS + part)


def row_and_part(number: int) -> tuple[int, int]:
    """The kept state and the part for which a negative number stands."""
    return divmod(-1 - number, MAX_STATE_PARTS)


def page_checksum(digest: bytes, content: Any) -> bytes:
    """The checksum of a page: the beginning of the SHA-256 of the digest of its prefix and its
    bytes. So the bytes of one prefix are not taken for those of another, whatever a journal
    says."""
    hashed = hashlib.sha256(digest)
    hashed.update(content)
    return hashed.digest()[:CHECKSUM_BYTES]


class OpenPages(Message, frozen=True, kw_only=True):
    """The file of the pages on disk, before the first order that needs it. Each rank has its own:
    behind the first one's, their names end with the rank."""

    path: str
    num_slots: int
    """What is behind them is cut off: the quota was larger, or nothing is known of it."""


class ClearPages(Message, frozen=True, kw_only=True):
    """Empty the file of pages, after the writes that were ordered before. It has no answer."""


class SavePages(Message, frozen=True, kw_only=True):
    """Copy these pages now, and write them to disk beside the steps that follow."""

    pages: PackedIds
    """Below 0: parts of kept states (:func:`state_part`)."""
    slots: PackedIds
    """Where each is written, in slots of the file of each rank."""
    digests: bytes
    """Of the prefixes that they end, 32 bytes each."""


class ReadPages(Message, frozen=True, kw_only=True):
    """Read pages from disk beside the steps that follow. Nobody reads or writes these pages of the
    pool until the answer."""

    number: int
    """Of the order."""
    pages: PackedIds
    """Below 0: parts of kept states (:func:`state_part`)."""
    slots: PackedIds
    digests: bytes
    """Of the prefixes that they end, 32 bytes each."""
    checksums: bytes
    """The :func:`page_checksum` of each rank, page by page."""
    within_s: float
    """Computing them takes so long; the worker gives up if reading would take longer."""


class PagesWritten(Message, frozen=True, kw_only=True):
    """What became of a SavePages. Each rank answers them in order."""

    rank: int = 0
    slots: PackedIds
    """Those that were written."""
    checksums: bytes
    failed: PackedIds = b""
    """Those that were not."""
    error: str = ""
    """Why."""


class PagesRead(Message, frozen=True, kw_only=True):
    """What became of a ReadPages. Each rank answers them in order."""

    number: int
    rank: int = 0
    num_pages: int
    """The first ones, which are in the pool and match their checksums."""
    is_damaged: bool = False
    """The next one does not match its checksum, or cannot be read."""
    seconds: float = 0.0
    """For reading and checking."""
    error: str = ""
    """Of the system, if there was one."""
