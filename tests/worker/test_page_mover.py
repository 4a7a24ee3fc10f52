"""Files of pages and journals that were damaged while no server ran: what is read from them is what
was written, or nothing.

``RADIXRT_DAMAGES`` says how many damages are tried, ``RADIXRT_EVICTIONS`` how many pages leave memory.
"""

import itertools
import os
import queue
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace

from radixrt.kv.store.directory import (
    CacheDirectory,
    fingerprint_of,
    replica_folders,
    used_bytes,
)
from radixrt.kv.store.journal import framed, read_records
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.ids import PackedIds, pack_ids, unpack_ids
from radixrt.messages.links import PageMove
from radixrt.messages.moves import (
    DIGEST_BYTES,
    ClearPages,
    OpenPages,
    PagesRead,
    PagesWritten,
    ReadPages,
    SavePages,
    state_part,
)
from radixrt.scheduler.disk.index import NO_SLOT, DiskIndex, PageName
from radixrt.scheduler.disk.pages import LOOK_EVERY, DiskPages
from radixrt.scheduler.disk.ranks import RankAnswers
from radixrt.worker.kv.page_mover import PageMover

DAMAGES = int(os.environ.get("RADIXRT_DAMAGES", "300"))
EVICTIONS = int(os.environ.get("RADIXRT_EVICTIONS", "6000"))
PAGE_SIZE, NUM_PAGES = 4, 24
PARTS = {"weights": "of these tests"}


class Store:
    """For each rank a pool with three tensors of different widths and dtypes and its mover, and the
    pages on disk of one start of a server."""

    def __init__(self, num_ranks: int) -> None:
        shapes = [(torch.float32, (2, 3)), (torch.bfloat16, (1, 5)), (torch.int8, (2, 4))]
        self.tensors = [
            torch.zeros((NUM_PAGES + 1, PAGE_SIZE, *shape), dtype=dtype)
            for _ in range(num_ranks)
            for dtype, shape in shapes
        ]
        self._answers: queue.SimpleQueue[PagesWritten | PagesRead] = queue.SimpleQueue()
        self._movers = [
            PageMover(
                [tuple(self.tensors[3 * rank : 3 * rank + 3])], self._answers.put, rank, num_ranks
            )
            for rank in range(num_ranks)
        ]
        self._joined = RankAnswers(num_ranks)
        self._numbers = itertools.count()

    def order(self, order: PageMove) -> None:
        for mover in self._movers:
            mover.take(order)

    def answer(self) -> PagesWritten | PagesRead:
        """The answer of all ranks."""
        while (answer := self._joined.add(self._answers.get())) is None:
            pass
        return answer

    def open(self, folder: Path, quota_bytes: int = 1 << 20) -> None:
        self.disk = DiskPages(
            CacheDirectory.own(folder, PARTS, patience_s=0.0),
            fingerprint_of(PARTS),
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            slot_bytes=sum(mover.page_bytes for mover in self._movers),
            quota_bytes=quota_bytes,
            num_ranks=len(self._movers),
        )
        order = self.disk.take_order()
        assert order is not None
        self.order(order)

    def fill(self, page: int, seed: int) -> bytes:
        """Give a page random content, which is returned."""
        rng = np.random.default_rng(seed)
        for tensor in self.tensors:
            content = rng.integers(0, 256, tensor[page].nbytes, dtype=np.uint8)
            tensor[page].view(torch.uint8).copy_(
                torch.from_numpy(content).view(tensor[page].view(torch.uint8).shape)
            )
        return self.content(page)

    def content(self, page: int) -> bytes:
        return b"".join(tensor[page].view(torch.uint8).numpy().tobytes() for tensor in self.tensors)

    def save(self, tokens: list[int], seed: int) -> dict[PageName, bytes]:
        """Write the pages of a prompt; returns their contents."""
        disk, ids = self.disk, np.array(tokens, dtype=np.int32)
        pages = np.arange(len(ids) // PAGE_SIZE, dtype=np.int32)
        disk.names.stored(BASE_ROOT, None, ids, pages)
        disk.begin_plan()
        disk.used(pages)
        written = {}
        for page in pages.tolist():
            name = disk.names.name(page)
            assert name is not None
            written[name] = self.fill(page, seed + page)
        while (order := disk.take_order()) is not None:
            self.order(order)
            for page in range(NUM_PAGES):
                self.fill(page, 0)  # the next step writes to the pages
            answer = self.answer()
            assert isinstance(answer, PagesWritten) and not answer.error
            disk.written(answer)
        disk.names.removed(pages)
        disk.forget_removed()
        return written

    def read(self, names: list[PageName], slots: list[int], within_s: float = 1e6) -> list[bytes]:
        """What is read from these slots, until something is wrong."""
        sums = b"".join(map(self.disk.index.checksum, slots))
        pages = list(range(len(slots)))[::-1]
        order = ReadPages(
            number=next(self._numbers),
            pages=pack_ids(pages),
            slots=pack_ids(slots),
            digests=b"".join(name.digest for name in names),
            checksums=sums,
            within_s=within_s,
        )
        self.order(order)
        answer = self.answer()
        assert isinstance(answer, PagesRead) and answer.number == order.number
        assert answer.is_damaged == (answer.num_pages < len(slots)) or within_s < 1
        return [self.content(page) for page in pages[: answer.num_pages]]


PROMPTS = [list(range(40)), [*range(20), *range(60, 80)], [7] * 40]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def store(request: pytest.FixtureRequest) -> Store:
    return Store(request.param)


@pytest.fixture(scope="module")
def filled(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict]]:
    folder, written = tmp_path_factory.mktemp("filled") / "cache", {}
    store.open(folder)
    for number, prompt in enumerate(PROMPTS):
        written |= {
            name: content
            for name, content in store.save(prompt, 100 * number).items()
            if name not in written
        }
    store.disk.close()
    yield folder, written


def found(store: Store, prompt: list[int]) -> list[tuple[PageName, bytes]]:
    """The pages of a prompt that are found on disk, with their contents."""
    packed = np.array(prompt, np.int32).tobytes()
    names = list(store.disk.names.behind(None, BASE_ROOT, packed))
    slots = list(
        itertools.takewhile(lambda slot: slot != NO_SLOT, map(store.disk.index.find, names))
    )
    return list(zip(names, store.read(names[: len(slots)], slots), strict=False)) if slots else []


def damage(folder: Path, other: Path, rng: random.Random) -> str:
    """Damage the files of a directory; returns what was done."""
    (replica,) = folder.glob("*/r0")
    file = rng.choice([replica / "journal", *sorted(replica.glob("pages*"))])
    content = bytearray(file.read_bytes())
    at = rng.randrange(len(content))
    match kind := rng.choice(["bits", "cut", "hole", "shift", "swap parts", "swap file", "append"]):
        case "bits":
            for _ in range(rng.choice([1, 2, 50])):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case "cut":
            del content[at:]
        case "hole":
            end = min(at + rng.choice([1, 50, 500]), len(content))
            content[at:end] = bytes(end - at)
        case "shift":
            content[at:at] = rng.randbytes(rng.choice([1, 8, 100]))
        case "swap parts":
            size = rng.choice([16, 100])
            to = rng.randrange(len(content))
            part = content[at : at + size]
            content[at : at + size] = content[to : to + size]
            content[to : to + size] = part
        case "swap file":
            (replica_of_other,) = other.glob("*/r0")
            content = bytearray((replica_of_other / file.name).read_bytes())
        case "append":
            content += rng.randbytes(rng.choice([1, 7, 300]))
    file.write_bytes(content)
    return f"{kind} of {file.name}"


def test_undamaged_files_give_back_every_page(store: Store, filled: tuple[Path, dict], tmp_path: Path) -> None:  # fmt: skip
    folder, written = filled
    store.open(Path(shutil.copytree(folder, tmp_path / "cache")))
    for prompt in PROMPTS:
        pages = found(store, prompt)
        assert len(pages) == 10 and all(written[name] == content for name, content in pages)
    store.disk.close()


def test_damaged_files_never_give_a_wrong_page(
    store: Store, filled: tuple[Path, dict], tmp_path: Path
) -> None:
    folder, written = filled
    other = tmp_path / "other"
    store.open(other)
    store.save([9] * 40, 7000)
    store.disk.close()
    fewer, rng = 0, random.Random(3)
    for number in range(DAMAGES // 2):
        copy = Path(shutil.copytree(folder, tmp_path / "cache"))
        done = damage(copy, other, rng)
        store.open(copy)
        total = 0
        for prompt in PROMPTS:
            pages = found(store, prompt)
            total += len(pages)
            for name, content in pages:
                assert written[name] == content, f"a wrong page after {done}, damage {number}"
        fewer += total < 30
        again = store.save(PROMPTS[2], 200)  # what is missing can be written again
        for name, content in found(store, PROMPTS[2]):
            assert content in (again[name], written[name])
        store.disk.close()
        shutil.rmtree(copy)
    assert fewer > DAMAGES / 6, "most damages cost something, or they were none"


def test_a_record_of_other_tokens_gives_no_page(
    store: Store, filled: tuple[Path, dict], tmp_path: Path
) -> None:
    """A damage that the record's CRC does not show: the pages of one prompt as those of another."""
    copy = Path(shutil.copytree(filled[0], tmp_path / "cache"))
    (journal,) = copy.glob("*/r0/journal")
    records, _ = read_records(journal.read_bytes())
    other = [9999, *PROMPTS[2][1:]]
    packed = np.array(other, np.int32).tobytes()
    changed = [
        replace(one, tokens=packed) if getattr(one, "tokens", b"")[:4] == packed[4:8] else one
        for one in records
    ]
    assert changed != records
    journal.write_bytes(b"".join(map(framed, changed)))
    store.open(copy)
    assert not found(store, other) and len(found(store, PROMPTS[0])) == 10
    store.disk.close()


def test_equal_digests_of_different_tokens_are_told_apart() -> None:
    index = DiskIndex(4, 4 * PAGE_SIZE)
    name = PageName(b"root", 0, bytes(16), b"digest")
    index.add(name, index.take_slot()[0], bytes(16))
    assert index.find(name) == 0
    assert index.find(name._replace(tokens=bytes(15) + b"x")) == NO_SLOT


def test_a_slow_read_is_given_up(store: Store, filled: tuple[Path, dict], tmp_path: Path) -> None:
    store.open(Path(shutil.copytree(filled[0], tmp_path / "cache")))
    packed = np.array(PROMPTS[0], np.int32).tobytes()
    names = list(store.disk.names.behind(None, BASE_ROOT, packed))
    slots = list(map(store.disk.index.find, names))
    assert len(store.read(names, slots, within_s=0.0)) == 8
    store.disk.close()


def test_without_a_file_writing_stops(store: Store, tmp_path: Path) -> None:
    store.open(tmp_path / "cache")
    (replica,) = (tmp_path / "cache").glob("*/r0")
    (replica / "pages").unlink()
    (replica / "pages").symlink_to(tmp_path / "elsewhere")
    store.order(OpenPages(path=str(replica / "pages"), num_slots=NUM_PAGES))
    ids = np.arange(40, dtype=np.int32)
    store.disk.names.stored(BASE_ROOT, None, ids, np.arange(10, dtype=np.int32))
    store.disk.begin_plan()
    store.disk.used(np.arange(10, dtype=np.int32))
    order = store.disk.take_order()
    assert order is not None
    store.order(order)
    answer = store.answer()
    assert isinstance(answer, PagesWritten) and len(unpack_ids(answer.failed)) == 10
    store.disk.written(answer)
    assert store.disk.error and store.disk.take_order() is None
    assert not (tmp_path / "elsewhere").exists()
    store.disk.names.removed(np.arange(10, dtype=np.int32))
    store.disk.forget_removed()
    store.disk.close()


def test_a_kept_state_comes_back_in_parts_of_the_size_of_a_page(tmp_path: Path) -> None:
    pool = [(torch.zeros((NUM_PAGES + 1, PAGE_SIZE, 10), dtype=torch.uint8),)]
    tables = [torch.rand(5, 3, 7), torch.rand(5, 11).bfloat16()]
    before = [table.clone() for table in tables]
    answers: queue.SimpleQueue[PagesWritten | PagesRead] = queue.SimpleQueue()
    mover = PageMover(pool, answers.put, states=tables)
    assert mover.page_bytes == 40, "a state of 106 bytes has three parts"
    mover.take(OpenPages(path=str(tmp_path / "pages"), num_slots=NUM_PAGES))
    slots, digests = pack_ids([4, 1, 7]), bytes(3 * DIGEST_BYTES)

    def parts(row: int) -> PackedIds:
        return pack_ids([state_part(row, part) for part in range(3)])

    mover.take(SavePages(pages=parts(2), slots=slots, digests=digests))
    written = answers.get()
    assert isinstance(written, PagesWritten) and written.slots == slots
    order = ReadPages(
        number=1,
        pages=parts(4),
        slots=slots,
        digests=digests,
        checksums=written.checksums,
        within_s=1e6,
    )
    mover.take(order)
    assert answers.get().num_pages == 3  # type: ignore[union-attr]
    for table, old in zip(tables, before, strict=True):
        assert torch.equal(table[4], old[2]) and torch.equal(table[:4], old[:4])


class Churn:
    """Pages of 8 KiB that enter memory, are used twice and leave it, each for the only time."""

    def __init__(self) -> None:
        tensor = torch.zeros((NUM_PAGES + 1, PAGE_SIZE, 2048), dtype=torch.uint8)
        self.pool: list[tuple[torch.Tensor, ...]] = [(tensor,)]
        self.answers: queue.SimpleQueue[PagesWritten | PagesRead] = queue.SimpleQueue()
        self.mover = PageMover(self.pool, self.answers.put)

    def open(
        self,
        folder: Path,
        quota_bytes: int,
        replica: int = 0,
        replicas: int = 1,
        model: str = "of these tests",
    ) -> DiskPages:
        parts = {"weights": model}
        disk = DiskPages(
            CacheDirectory.own(folder, parts, replica, patience_s=0.0),
            fingerprint_of(parts),
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            slot_bytes=self.mover.page_bytes,
            quota_bytes=quota_bytes,
            share=1 / replicas,
        )
        order = disk.take_order()
        assert order is not None
        self.mover.take(order)
        return disk

    def evict(self, disk: DiskPages, token: int) -> None:
        """Let all pages of memory be used twice, written and evicted: a prompt of one token."""
        pages = np.arange(NUM_PAGES, dtype=np.int32)
        tokens = np.full(NUM_PAGES * PAGE_SIZE, token, dtype=np.int32)
        disk.names.stored(BASE_ROOT, None, tokens, pages)
        disk.begin_plan()
        disk.used(pages)
        while (order := disk.take_order()) is not None:
            self.mover.take(order)
            answer = self.answers.get()
            assert isinstance(answer, PagesWritten) and not answer.error
            disk.written(answer)
        disk.names.removed(pages)
        disk.evicted()


def test_evictions_keep_disk_and_memory_within_the_quota(tmp_path: Path) -> None:
    """``RADIXRT_EVICTIONS=1000000`` takes some minutes."""
    quota, churn = 16 << 20, Churn()
    disk = churn.open(tmp_path / "cache", quota)
    process, rounds = psutil.Process(), max(2, EVICTIONS // NUM_PAGES)
    settled, most = 0, 0
    for number in range(rounds):
        churn.evict(disk, number)
        if number % 200 == 199 or number == rounds - 1:
            disk._journal.wait()
            most = max(most, used_bytes(disk.directory.path))
        if number == rounds // 2:
            settled = process.memory_info().rss
    assert disk.written_pages == rounds * NUM_PAGES and len(disk.index) == quota // (8 << 10)
    assert quota / 2 < most <= 1.05 * quota
    assert process.memory_info().rss - settled <= 0.05 * quota + (4 << 20)
    disk.close()


def test_a_smaller_quota_shrinks_the_file_and_keeps_what_fits(tmp_path: Path) -> None:
    churn, quota = Churn(), 4 << 20
    disk = churn.open(tmp_path / "cache", quota)
    for number in range(20):
        churn.evict(disk, number)
    disk.close()
    disk = churn.open(tmp_path / "cache", quota // 4)
    churn.evict(disk, 0)
    assert 0 < len(disk.index) <= quota // 4 // churn.mover.page_bytes
    assert used_bytes(disk.directory.path) <= 1.05 * quota / 4 + (1 << 17)
    disk.close()


def test_a_directory_full_of_another_model_makes_room_for_this_one(tmp_path: Path) -> None:
    churn, quota = Churn(), 1 << 20
    other = CacheDirectory.own(tmp_path / "cache", {"weights": "others"}, patience_s=0.0)
    (other.path / "pages").write_bytes(bytes(2 * quota))
    other.close()
    disk = churn.open(tmp_path / "cache", quota)
    churn.evict(disk, 0)
    assert len(disk.index) == NUM_PAGES and not other.path.exists()
    disk.close()


def test_folders_of_others_are_looked_for_once_in_a_thousand_dropped_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    churn, looks = Churn(), list[int]()
    monkeypatch.setattr(CacheDirectory, "drop_oldest", lambda _, replicas: looks.append(replicas))
    disk = churn.open(tmp_path / "cache", 1 << 20, replicas=2)
    for number in range(120):
        churn.evict(disk, number)
    assert disk.dropped_pages > 2 * LOOK_EVERY and looks == [2, 2, 2]
    disk.close()


def test_the_quota_is_that_of_all_replicas_together(tmp_path: Path) -> None:
    quota, churn = 4 << 20, Churn()
    for replica in range(2):
        disk = churn.open(tmp_path / "cache", quota, replica, replicas=2)
        for number in range(40):
            churn.evict(disk, number)
        assert disk.dropped_pages > 0
        disk.close()
    folders = [used_bytes(folder) for folder in replica_folders(tmp_path / "cache")]
    assert len(folders) == 2 and min(folders) > quota / 3
    assert sum(folders) <= 1.05 * quota + (2 << 17), "journals of up to a thousand pages beside"


@pytest.mark.parametrize("is_interleaved", [False, True], ids=["in turn", "interleaved"])
def test_the_quota_is_that_of_all_live_servers_together(tmp_path: Path, is_interleaved: bool) -> None:  # fmt: skip
    quota = 4 << 20
    churns = [Churn() for _ in range(3)]
    disks = [churn.open(tmp_path / "cache", quota, model=str(n)) for n, churn in enumerate(churns)]
    evictions = [(n, token) for n in range(3) for token in range(30)]
    if is_interleaved:
        evictions.sort(key=lambda one: one[1])
    for number, token in evictions:
        churns[number].evict(disks[number], token)
    for disk in disks:
        disk.close()
    total = sum(map(used_bytes, replica_folders(tmp_path / "cache")))
    assert 0.9 * quota < total <= 1.05 * quota + (3 << 17), "journals of a thousand pages beside"


def test_a_server_that_has_flushed_stays_within_what_others_leave(tmp_path: Path) -> None:
    quota, churns = 2 << 20, [Churn(), Churn()]
    first, second = (
        churn.open(tmp_path / "cache", quota, model=str(number))
        for number, churn in enumerate(churns)
    )
    for token in range(12):
        churns[0].evict(first, token)
    churns[1].evict(second, 0)
    first.flush()
    order = first.take_order()
    assert order is not None and len(second.index) <= 2
    churns[0].mover.take(order)
    for token in range(12 + LOOK_EVERY // NUM_PAGES):
        churns[1].evict(second, token)
    for token in range(12):
        churns[0].evict(first, token)
    assert len(second.index) > 0.9 * quota // second.slot_bytes
    assert sum(map(used_bytes, replica_folders(tmp_path / "cache"))) <= 1.05 * quota + (2 << 17)
    first.close()
    second.close()


def test_a_replica_that_finds_no_room_gets_it_when_another_has_shrunk(tmp_path: Path) -> None:
    quota, churns = 1 << 20, [Churn(), Churn()]
    disk = churns[0].open(tmp_path / "cache", quota)
    for token in range(10):
        churns[0].evict(disk, token)
    disk.close()
    second = churns[1].open(tmp_path / "cache", quota, 1, 2)
    churns[1].evict(second, 0)
    assert len(second.index) == 0
    first = churns[0].open(tmp_path / "cache", quota, 0, 2)
    for token in range(2 + LOOK_EVERY // NUM_PAGES):
        churns[1].evict(second, token)
    assert len(second.index) >= NUM_PAGES
    assert sum(map(used_bytes, replica_folders(tmp_path / "cache"))) <= 1.05 * quota + (2 << 17)
    first.close()
    second.close()


def test_a_flush_empties_the_file_behind_the_writes_before_it(store: Store, tmp_path: Path) -> None:
    store.open(tmp_path / "cache")
    store.save(PROMPTS[0], 1)
    files = list(store.disk.directory.path.glob("pages*"))
    assert files and all(file.stat().st_size for file in files)
    store.disk.flush()
    order = store.disk.take_order()
    assert isinstance(order, ClearPages)
    store.order(order)
    written = store.save([5] * 8, 2)
    assert [content for _, content in found(store, [5] * 8)] == list(written.values())
    assert not found(store, PROMPTS[0])
    width = sum(file.stat().st_size for file in files)
    assert width == 2 * store.disk.slot_bytes, "slots begin anew"
    store.disk.close()
