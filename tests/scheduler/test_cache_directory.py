"""The folders of a cache directory: which belong to whom, and which are removed for others."""

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from radixrt.base.errors import ConfigError
from radixrt.kv.store import directory
from radixrt.kv.store.directory import CacheDirectory, replica_folders
from radixrt.kv.store.journal import Header, PagesDropped, PagesSaved, Record, framed, read_records
from radixrt.messages.ids import pack_ids


def own(folder: Path, model: str, replica: int = 0) -> CacheDirectory:
    return CacheDirectory.own(folder, {"weights": model}, replica, patience_s=0.0)


def left(folder: Path, model: str, used_at: float, replica: int = 0) -> Path:
    """The folder of a server that has ended."""
    owned = own(folder, model, replica)
    (owned.path / "pages").write_bytes(bytes(1 << 16))
    owned.close()
    os.utime(owned.path / "lock", (used_at, used_at))
    return owned.path


def test_the_folder_that_was_used_longest_ago_is_removed_first(tmp_path: Path) -> None:
    newer, older = left(tmp_path, "newer", 2000.0), left(tmp_path, "older", 1000.0)
    live, mine = own(tmp_path, "live"), own(tmp_path, "mine")
    os.utime(live.path / "lock", (1.0, 1.0))
    assert mine.bytes_of_others() >= 2 << 16
    assert mine.drop_oldest() and not older.parent.exists() and newer.exists()
    assert mine.drop_oldest() and not newer.parent.exists()
    assert not mine.drop_oldest() and live.path.exists() and mine.path.exists()


def test_replicas_that_are_no_more_make_room_for_those_that_are(tmp_path: Path) -> None:
    for replica in (1, 2):
        left(tmp_path, "mine", 1000.0 + replica, replica)
    mine = own(tmp_path, "mine")
    assert mine.drop_oldest(2) and not mine.drop_oldest(2)
    assert [one.name for one in replica_folders(tmp_path)] == ["r0", "r1"]
    assert (mine.path.parent / "model.json").is_file()


def test_no_link_leads_out_of_the_directory(tmp_path: Path) -> None:
    outside = left(tmp_path / "outside", "precious", 1.0)
    mine = own(tmp_path / "cache", "mine")
    (tmp_path / "cache" / "link").symlink_to(outside.parent)
    (mine.path.parent / "r7").symlink_to(outside)
    assert mine.bytes_of_others() == 0 and not mine.drop_oldest() and (outside / "pages").is_file()


@pytest.mark.parametrize("place", [".", "secret", "{model}", "{model}/r0/lock"])
def test_a_link_in_any_place_is_refused(tmp_path: Path, place: str) -> None:
    first = own(tmp_path / "cache", "mine")
    first.close()
    link = tmp_path / "cache" / place.format(model=first.path.parent.name)
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    is_top = place == "."
    said = "name the folder itself" if is_top else r"levels of symbolic links|Not a directory"
    with pytest.raises(OSError, match=said):
        own(tmp_path / "cache", "mine")


SAVED = PagesSaved(bytes(32), 0, bytes(64), pack_ids([0]), bytes(16))


@pytest.mark.parametrize(
    "forged",
    [
        replace(SAVED, slots=b"abc"),
        replace(SAVED, depth=-1),
        replace(SAVED, before=b"short"),
        PagesDropped(b"abc"),
        Header("", page_size=0, slot_bytes=64),
    ],
    ids=str,
)
def test_a_forged_record_ends_a_journal(forged: Header | Record) -> None:
    records, end = read_records(b"".join(map(framed, (SAVED, forged, SAVED))))
    assert records == [SAVED] and end == len(framed(SAVED))


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    def fails(fd: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for write in (fails, lambda fd, content: 1):
        monkeypatch.setattr(directory.os, "write", write)
        with pytest.raises(OSError, match="No space left"):
            own(tmp_path / "cache", "mine")
        assert not [*(tmp_path / "cache").iterdir()]
    monkeypatch.undo()
    own(tmp_path / "cache", "mine")


def test_a_folder_of_all_users_is_refused(tmp_path: Path) -> None:
    path = own(tmp_path / "cache", "mine").path
    path.parent.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        own(tmp_path / "cache", "mine")
