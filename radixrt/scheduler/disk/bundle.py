"""Bundles: files with the KV of some prefixes, for other cache directories of the same model on the
same kernels.

A bundle is a head, the records of a journal, the bytes of the pages in the order of the records, and
the SHA-256 of all that. Digests in it begin at a root of its own, because the roots of a directory
depend on its secret. Nothing shows that its KV is that of its tokens: whoever makes it is trusted, as
those who make weights are.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from radixrt.base.errors import ConfigError
from radixrt.kv.store.directory import CacheDirectory, fingerprint_of, open_private
from radixrt.kv.store.journal import FORM, Header, PagesSaved, framed, read_records
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.ids import ID_BYTES, pack_ids, unpack_ids
from radixrt.messages.moves import DIGEST_BYTES, PagesWritten, page_checksum
from radixrt.scheduler.disk.index import DiskIndex, PageName, page_names, saved_records
from radixrt.scheduler.disk.pages import DiskPages

log = logging.getLogger(__name__)

MAGIC = b"radixrt bundle 1\n"
ROOT = bytes(DIGEST_BYTES)
"""Digest of the empty prefix."""
_LENGTH_BYTES = 8
MAX_HEAD_BYTES = 1 << 30
_CPU = "cpu"
"""Empty in the parts of a bundle whose KV the native kernels alone have computed."""


class Head(msgspec.Struct, frozen=True, array_like=True):
    """What a bundle holds."""

    parts: dict[str, str]
    """What the bits of the KV depend on, by name."""
    header: Header
    titles: list[str]
    """The names of the prefixes' files."""
    num_pages: int


class Added(NamedTuple):
    """What a directory has of a bundle's pages."""

    new: int
    there: int
    """How many of these the directory had before."""


class Page(NamedTuple):
    """A page in a directory or a bundle."""

    name: PageName
    slot: int
    checksum: bytes


def rebased(pages: Iterable[Page], old_root: bytes, new_root: bytes) -> list[Page]:
    """The pages below one root, named as pages below another one; those below no such root are left
    out."""
    digests = {old_root: new_root}
    found = []
    for page in sorted(pages, key=lambda one: one.name.depth):
        before = digests.get(page.name.before)
        if before is not None:
            tokens = page.name.tokens
            (name,) = page_names(before, page.name.depth, tokens, len(tokens))
            digests[page.name.digest] = name.digest
            found.append(page._replace(name=name))
    return found


def renamed(page: Page, old: PageName, file: BinaryIO, header: Header, first: int = 0) -> Page:
    """A page that has another name now, with the checksum that belongs to it.

    Args:
        file: with the pages from the byte ``first`` on, in their slots.

    Raises:
        ConfigError: its bytes are not those that had its old name.
    """
    file.seek(first + page.slot * header.slot_bytes)
    content = file.read(header.slot_bytes)
    if page_checksum(old.digest, content) != page.checksum:
        raise ConfigError("A page is damaged: export it again.")
    return page._replace(checksum=page_checksum(page.name.digest, content))


def write_bundle(
    path: Path, parts: dict[str, str], titles: list[str], directory: Path, root: bytes
) -> Head:
    """Write the pages of a directory below a root to a bundle.

    Args:
        directory: of a replica; no server uses it.

    Raises:
        ConfigError: there are none, or one is damaged.
    """
    header, index = read_index(directory)
    if header.num_ranks > 1:
        raise ConfigError("A bundle holds the KV of one rank: export it without --tp.")
    stored = {page[1]: Page(*page) for page in index.pages()}
    pages = rebased(stored.values(), root, ROOT)
    if not pages:
        raise ConfigError("The prefixes fill no page, so there is no KV to export.")
    with (directory / "pages").open("rb") as file:
        pages = [renamed(page, stored[page.slot].name, file, header) for page in pages]
    records = b"".join(map(framed, saved_records(pages)))
    head = Head(parts, header, titles, len(pages))
    part = path.with_name(path.name + ".part")
    with part.open("wb") as out, (directory / "pages").open("rb") as file:
        hashed = hashlib.sha256()
        for piece in _pieces(msgspec.msgpack.encode(head), records, pages, header, file):
            hashed.update(piece)
            out.write(piece)
        out.write(hashed.digest())
    part.replace(path)
    return head


def _pieces(
    head: bytes, records: bytes, pages: list[Page], header: Header, stored: BinaryIO
) -> Iterator[bytes]:
    yield MAGIC
    for part in (head, records):
        yield len(part).to_bytes(_LENGTH_BYTES, "little")
        yield part
    for page in pages:
        stored.seek(page.slot * header.slot_bytes)
        yield stored.read(header.slot_bytes)


def read_bundle(path: Path) -> tuple[Head, list[Page], BinaryIO]:
    """The head and pages of a bundle, whose slots count in it; and the file, at the first page.

    Raises:
        ConfigError: it is none, or damaged.
    """
    try:
        file = path.open("rb")
        size = path.stat().st_size - hashlib.sha256().digest_size
        _check_digest(file, size, path)
        file.seek(0)
        if file.read(len(MAGIC)) != MAGIC:
            raise ConfigError(f"{path} is no bundle of this version of radixrt.")
        head = msgspec.msgpack.decode(_part(file), type=Head)
        records, _ = read_records(_part(file))
        page_size, slot_bytes = head.header.page_size, head.header.slot_bytes
        lengths = page_size, slot_bytes, head.num_pages
        if min(lengths) < 1 or head.num_pages * slot_bytes != size - file.tell():
            raise OSError("its pages are not as long as its head says")
        if head.header != Header(fingerprint_of(head.parts), page_size, slot_bytes):
            raise OSError("the parts of its head contradict one another")
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    index = DiskIndex(head.num_pages, ID_BYTES * head.header.page_size)
    saved = [record for record in records if isinstance(record, PagesSaved)]
    numbered, start = [], 0
    for record in saved:
        count = len(unpack_ids(record.slots))
        numbered.append(msgspec.structs.replace(record, slots=pack_ids(range(start, start + count))))  # fmt: skip
        start += count
    index.replay(numbered)
    if len(index) != head.num_pages:
        raise ConfigError(f"{path} cannot be read: its records name {len(index)} pages of {head.num_pages}.")  # fmt: skip
    return head, [Page(*page) for page in index.pages()], file


def _check_digest(file: BinaryIO, size: int, path: Path) -> None:
    hashed, left = hashlib.sha256(), size
    while left > 0 and (piece := file.read(min(left, 1 << 22))):
        hashed.update(piece)
        left -= len(piece)
    if size <= 0 or file.read() != hashed.digest():
        raise ConfigError(f"{path} is damaged, or no bundle: its digest is not that of its content.")  # fmt: skip


def _part(file: BinaryIO) -> bytes:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if length > MAX_HEAD_BYTES:
        raise OSError("its head is too large")
    return file.read(length)


def import_bundle(path: Path, directory: Path, quota_gb: float, here: dict[str, str]) -> int:
    """Add the pages of a bundle to a cache directory; returns those that are new.

    Args:
        here: the parts of a fingerprint that are this machine's.

    Raises:
        ConfigError: the bundle is damaged, was made on another kind of machine or has pages of
            another form, a server uses the directory, or there is no room for all of it.
    """
    head, pages, file = read_bundle(path)
    if not head.parts.get(_CPU):
        here = {name: value for name, value in here.items() if name != _CPU}
    _check_parts(path, head, here)
    header = head.header
    try:
        owned = CacheDirectory.own(directory, head.parts)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--cache-dir {directory} cannot be used: {reason}.") from error
    try:
        there = _header_in(owned.path)
        if there is not None and (there.fingerprint, there.form) == (header.fingerprint, FORM):
            _check_form(path, header, there)  # else the journal is begun anew
    except ConfigError:
        owned.close()
        raise
    disk = DiskPages(
        owned,
        header.fingerprint,
        num_pages=0,
        page_size=header.page_size,
        slot_bytes=header.slot_bytes,
        quota_bytes=int(quota_gb * 1e9),
    )
    try:
        added = _add(head, pages, file, disk)
    finally:
        disk.close()
    if added.there < len(pages):
        reason = disk.error or "raise --cache-dir-gb"
        raise ConfigError(f"{directory} has room for {added.there} pages of {len(pages)}: {reason}.")  # fmt: skip
    return added.new


def add_bundle(path: Path, disk: DiskPages, parts: dict[str, str]) -> int:
    """Add the pages of a bundle to those on disk of an engine that starts; returns those that are
    new.

    Args:
        parts: of the engine's fingerprint.

    Raises:
        ConfigError: the bundle is damaged, belongs to another model or machine, or has pages of
            another form.
    """
    head, pages, file = read_bundle(path)
    _check_parts(path, head, dict.fromkeys(head.parts, "") | parts)
    _check_form(path, head.header, disk.header)
    added = _add(head, pages, file, disk)
    if added.there < len(pages):
        log.warning("--cache-dir has room for %d pages of %d of %s: raise --cache-dir-gb.", added.there, len(pages), path)  # fmt: skip
    return added.new


def _check_parts(path: Path, head: Head, here: dict[str, str]) -> None:
    for name, value in here.items():
        if head.parts.get(name) != value:
            raise ConfigError(
                f"{path} was made with another {name} ({printable(head.parts.get(name, 'unknown'))[:40]}) than there is here ({value[:40]}): "
                "its KV would have other bits. Export it with this model on a machine like this one."
            )


def _check_form(path: Path, header: Header, there: Header) -> None:
    """Raises ConfigError if the pages of a directory have another form than those of a bundle."""
    if (header.page_size, header.slot_bytes) != (there.page_size, there.slot_bytes):
        raise ConfigError(
            f"{path} has pages of {header.page_size} tokens and {header.slot_bytes} bytes, but those of this model "
            f"in --cache-dir have {there.page_size} and {there.slot_bytes}: export it again."
        )


def _header_in(folder: Path) -> Header | None:
    """The header of the journal in a replica's folder; None: there is none."""
    try:
        return read_index(folder)[0]
    except (FileNotFoundError, ConfigError):
        return None


def _add(head: Head, pages: list[Page], file: BinaryIO, disk: DiskPages) -> Added:
    header, directory = head.header, disk.directory
    first = file.tell()
    out = open_private("pages", directory.fd)
    root = directory.root_digest(BASE_ROOT.packed())
    named = {page.slot: page.name for page in pages}
    with file:
        new_pages = rebased(pages, ROOT, root)
        before = _num_there(new_pages, disk)
        for moved in new_pages:
            page = renamed(moved, named[moved.slot], file, header, first)
            file.seek(first + page.slot * header.slot_bytes)
            content = file.read(header.slot_bytes)
            if (slot := disk.take(page.name)) is None:
                continue
            try:
                os.pwrite(out, content, slot * header.slot_bytes)
            except OSError as error:
                reason = error.strerror or str(error)
                disk.written(PagesWritten(slots=b"", checksums=b"", failed=pack_ids([slot]), error=reason))  # fmt: skip
                break
            disk.written(PagesWritten(slots=pack_ids([slot]), checksums=page.checksum))
    os.close(out)
    there = _num_there(new_pages, disk)
    return Added(max(0, there - before), there)


def _num_there(pages: list[Page], disk: DiskPages) -> int:
    return sum(page.name.digest in disk.index for page in pages)


def read_index(directory: Path) -> tuple[Header, DiskIndex]:
    """The header and the pages of the journal in a replica's folder.

    Raises:
        ConfigError: there is none.
    """
    records, _ = read_records((directory / "journal").read_bytes())
    if not records or not isinstance(records[0], Header):
        raise ConfigError(f"{directory} has no journal of this version of radixrt.")
    index = DiskIndex(1 << 30, ID_BYTES * records[0].page_size, records[0].num_ranks)
    index.replay(one for one in records if not isinstance(one, Header))
    return records[0], index


def printable(text: str) -> str:
    r"""A text of a bundle or directory of others, whose control characters are escaped.

    >>> printable("a\x1b[31m")
    'a\\x1b[31m'
    """
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
