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


@pytest.mark.parametrize("has_others", [False, True], ids=["alone", "beside a replica"])
def test_a_server_that_starts_while_its_folder_is_removed_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_others: bool
) -> None:
    """The folder is gone when the lock is got."""
    left(tmp_path, "mine", 1000.0)
    replicas = [own(tmp_path, "mine", 1)] if has_others else []
    other, lock = own(tmp_path, "other"), directory._lock
    removed = list[bool]()

    def lock_after_removal(fd: int, patience_s: float) -> bool:
        if not removed:
            removed.append(False)
            removed[0] = other.drop_oldest()
        return lock(fd, patience_s)

    monkeypatch.setattr(directory, "_lock", lock_after_removal)
    mine = own(tmp_path, "mine")
    assert removed == [True] and os.listdir(mine.fd) == ["lock"]
    assert os.path.samestat(os.fstat(mine.fd), mine.path.stat())
    assert (mine.path.parent / "model.json").is_file()
    assert not other.drop_oldest(), "it is owned"
    assert len(replica_folders(tmp_path, mine.path.parent.name)) == 1 + len(replicas)


def test_a_removal_that_lost_the_race_leaves_the_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers remove a folder at once, and a third one has made it again meanwhile."""
    left(tmp_path, "mine", 1000.0)
    first, second, lock = own(tmp_path, "first"), own(tmp_path, "second"), directory._lock
    owned = list[CacheDirectory]()

    def lock_late(fd: int, patience_s: float) -> bool:
        monkeypatch.undo()
        assert first.drop_oldest()
        owned.append(own(tmp_path, "mine"))
        return lock(fd, patience_s)

    monkeypatch.setattr(directory, "_lock", lock_late)
    assert not second.drop_oldest() and os.listdir(owned[0].path) == ["lock"]


def test_a_folder_that_cannot_be_removed_protects_no_other(tmp_path: Path) -> None:
    bad, good = left(tmp_path, "bad", 1000.0), left(tmp_path, "good", 2000.0)
    (bad / "lock").rename(tmp_path / "elsewhere")
    (bad / "lock").symlink_to(tmp_path / "elsewhere")
    os.utime(bad / "lock", (1.0, 1.0), follow_symlinks=False)
    assert own(tmp_path, "mine").drop_oldest() and bad.exists() and not good.exists()
