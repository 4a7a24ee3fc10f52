"""Pages on disk under random operations: each answer is that of an undisturbed model, whatever is
evicted, read, damaged or started again.

``RADIXRT_SCHEDULER_EXAMPLES`` says how many histories are tried.
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.kv.store.directory import CacheDirectory
from radixrt.kv.store.journal import read_records
from radixrt.messages.adapters import AdapterInfo
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.requests import Tenant
from radixrt.scheduler.disk.index import NO_SLOT, DiskIndex, PageName
from radixrt.scheduler.disk.pages import DiskPages
from radixrt.scheduler.invariants import check_invariants
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.radix.key_ids import key_ids
from radixrt.scheduler.radix.return_hazards import ReturnHazards, Visit
from tests.scheduler.engine_model import EngineModel, limits

EXAMPLES = int(os.environ.get("RADIXRT_SCHEDULER_EXAMPLES", "30"))
CONTEXT = 96
STEMS = [[i % 5 for i in range(60)], [i % 5 for i in range(20)] + [9] * 40, [3] * 45]
MAX_WORK = 10_000


def open_disk(
    path: Path, of: SchedulerLimits, *, num_slots: int = 1000, fingerprint: str = "f" * 64
) -> DiskPages:
    """The pages on disk of a directory; a slot counts as 100 bytes."""
    return DiskPages(
        CacheDirectory.own(path, {"weights": fingerprint}, patience_s=0.0),
        fingerprint,
        num_pages=of.num_pages,
        page_size=of.page_size,
        slot_bytes=100,
        quota_bytes=100 * num_slots + (1 << 20),
        share=100 * num_slots / (100 * num_slots + (1 << 20)),
    )


class Server:
    """An engine whose pages outlive it."""

    def __init__(self, path: Path, of: SchedulerLimits, **options: int) -> None:
        self._path, self.limits, self._options = path, of, options
        self.slots: dict[int, bytes] = {}
        self.start()

    def start(self) -> None:
        self.engine = EngineModel(
            self.limits,
            has_states=self.limits.kept_states > 0,
            disk=open_disk(self._path, self.limits, **self._options),
        )
        self.engine.disk.slots = self.slots
        self.engine.worker.seconds_per_token = 0.01

    @property
    def pages(self) -> DiskPages:
        disk = self.engine.scheduler.state.kv.disk
        assert disk is not None
        return disk

    def kill(self) -> None:
        """What was not written to the journal by now is lost."""
        self.pages._journal.wait()
        self.pages.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def answer(self, prompt: list[int], **options: object) -> int:
        """Run a request, and write what is to be written; returns its tokens read from disk."""
        seq_id = self.engine.add(prompt, **options)  # type: ignore[arg-type]
        sequence = self.engine.scheduler.open.get(seq_id)
        self.settle()
        return 0 if sequence.disk_read is None else sequence.disk_read.tokens

    def settle(self) -> None:
        """Until nothing is left to do, for the disk neither."""
        for _ in range(MAX_WORK):
            self.engine.run()
            self.engine._send_orders()
            if not self.engine.answer_order():
                return
        raise AssertionError("there is always more to move")

    def checked(self) -> "Server":
        check_invariants(self.engine.scheduler)
        return self


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "cache", limits(num_pages=40))


PROMPT = list(range(41))


def test_a_restarted_server_reads_the_pages_that_were_used_twice(server: Server) -> None:
    assert server.answer(PROMPT) == server.answer(PROMPT) == 0
    server.restart()
    assert server.answer(PROMPT) == 40
    assert server.answer(PROMPT) == 0, "they are in memory now"


def test_pages_that_were_used_once_are_not_written(server: Server) -> None:
    server.answer(PROMPT)
    assert not server.slots


def test_a_pinned_prompt_is_written(server: Server) -> None:
    server.answer(PROMPT)

    server.engine.scheduler.state.kv.pin(np.array(PROMPT, np.int32), BASE_ROOT, 60.0)
    server.settle()
    server.restart()
    assert server.answer(PROMPT) == 40


@pytest.mark.parametrize("invocation, read", [((), 40), ((16, 17), 16)], ids=["whole", "activated"])
def test_an_adapter_reads_what_it_wrote_up_to_its_invocation(
    tmp_path: Path, invocation: tuple[int, ...], read: int
) -> None:
    """The ids behind an invocation mean another adapter to the next process, which then computes
    these pages."""
    infos = [
        AdapterInfo(name=one, digest=one, path="", place=place, invocation=invocation)
        for place, one in enumerate("ab")
    ]
    given: dict[str, Any] = {"num_pages": 40, "num_adapter_places": 2}
    server = Server(tmp_path / "cache", limits(adapters=tuple(infos), **given))
    server.answer(PROMPT, adapter="a")
    server.answer(PROMPT, adapter="a")
    server.limits = limits(adapters=tuple(reversed(infos)), **given)
    server.restart()
    assert server.answer(PROMPT, adapter="b") == (16 if invocation else 0)
    server.restart()
    assert server.answer(PROMPT, adapter="a") == read


@pytest.mark.parametrize("split", [32, 16], ids=["one run", "two runs"])
def test_images_behind_an_invocation_are_not_written(tmp_path: Path, split: int) -> None:
    """Their ids are those of a namespace, but do not show it; nor are their prefixes those of
    another process."""
    ids = np.concatenate((np.arange(8), -np.arange(500, 516), np.arange(8))).astype(np.int32)
    ids = np.concatenate((ids[:4], key_ids(ids[4:], 0)))  # pages of 4 tokens
    pages = np.arange(8, dtype=np.int32)
    disk = open_disk(tmp_path / "cache", limits(num_pages=8))
    disk.names.stored(BASE_ROOT, None, ids[:split], pages[: split // 4])
    disk.names.stored(BASE_ROOT, split // 4 - 1, ids[split:], pages[split // 4 :])
    disk.names.settle()
    names = [disk.names.name(page) for page in range(8)]
    assert [name is not None and disk.take(name) is not None for name in names] == [True] + 7 * [False]  # fmt: skip
    assert names == list(disk.names.behind(None, BASE_ROOT, ids.tobytes()))
    disk.close()


def test_evicted_pages_come_back_from_disk(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    for number in range(4):
        server.answer([100 + number] * 150)
    sequence = server.engine.scheduler.open.get(server.engine.add(PROMPT))
    server.settle()
    read = sequence.disk_read
    assert read is not None and read.tokens > 0
    assert read.evicted_s_ago is not None and 0 < read.evicted_s_ago < 60
    server.restart()
    sequence = server.engine.scheduler.open.get(server.engine.add(PROMPT))
    server.settle()
    assert sequence.disk_read is not None and sequence.disk_read.evicted_s_ago is None


def test_a_prompt_that_is_read_from_disk_has_returned(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, begin = [], ReturnHazards.begin

    def note(hazards: ReturnHazards, before: Visit | None, now: float) -> Visit:
        begun.append(before)
        return begin(hazards, before, now)

    monkeypatch.setattr(ReturnHazards, "begin", note)
    server.answer(PROMPT)
    server.answer(PROMPT)
    for number in range(4):
        server.answer([100 + number] * 150)
    assert server.answer(PROMPT) > 0
    assert [before is None for before in begun] == [True, False, *[True] * 4, False]


def is_on_disk(server: Server, prompt: list[int]) -> bool:
    """Whether the first page of a prompt is."""
    first = np.array(prompt[:4], np.int32).tobytes()
    return any(name.depth == 0 and name.tokens == first for name, *_ in server.pages.index.pages())


def test_what_was_dropped_for_others_returns_once_more_before_it_is_written(tmp_path: Path) -> None:
    server = Server(tmp_path / "cache", limits(num_pages=40), num_slots=12)
    tree, others = server.engine.scheduler.state.kv.tree, itertools.count(100)

    def ask_others_while(condition: Callable[[], bool]) -> None:
        while condition():
            server.answer([next(others)] * 41)

    def is_in_memory() -> bool:
        match = tree.match(np.array(PROMPT, np.int32), BASE_ROOT)
        return match is not None and match.num_pages > 0

    for is_written in (True, False, True):
        server.answer(PROMPT)
        ask_others_while(is_in_memory)
        assert is_on_disk(server, PROMPT) == is_written
        ask_others_while(lambda: is_on_disk(server, PROMPT))


BOB = Tenant(name="bob", cache_namespace="key:bob")


@pytest.mark.parametrize("other", [{"salt": "x"}, {"tenant": BOB}], ids=["salt", "tenant"])
def test_another_salt_or_tenant_finds_nothing(server: Server, other: dict[str, Any]) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    assert server.answer(PROMPT, **other) == 0
    assert server.answer(PROMPT) == 40


def test_another_fingerprint_finds_nothing(tmp_path: Path, server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.kill()
    other = Server(tmp_path / "cache", server.limits, fingerprint="e" * 64)
    other.slots.update(server.slots)
    assert other.answer(PROMPT) == 0


def test_a_damaged_page_is_computed_again_and_read_no_more(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    server.slots[4] = b"something else"
    assert server.answer(PROMPT) == 16
    assert server.pages.damaged_pages == 1
    server.restart()
    assert server.answer(PROMPT) in (16, 40), "the page may have been written again"


def test_a_damaged_page_is_forgotten_for_good(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    server.slots[4] = b"something else"
    server.answer(PROMPT)
    server.restart()
    server.answer(PROMPT)
    assert server.pages.damaged_pages == 0


def test_a_page_that_is_being_read_keeps_its_slot() -> None:
    index = DiskIndex(2, 16)
    for number in range(2):
        name = PageName(b"", 0, bytes(16), bytes([number]))
        index.add(name, index.take_slot()[0], bytes(16))
    index.hold([0])
    assert index.take_slot() == (1, True)
    assert index.take_slot() == (NO_SLOT, False)
    index.let_go([0])
    assert index.take_slot() == (0, True)


def test_uses_take_no_more_memory_than_pages() -> None:
    index = DiskIndex(100, 16)
    for number in range(200 * 100):
        if number % 100 == 0:
            index.drop(range(100))
        name = PageName(b"", 0, bytes(16), b"%d" % number)
        index.add(name, index.take_slot()[0], bytes(16))
    assert len(index._oldest) <= 3000 and len(index) == 100
    index.use([name.digest])
    last = index.find(name)
    assert [index.take_slot()[0] for _ in range(100)][-1] == last, "the others go first"


def test_a_sequence_that_needs_the_whole_pool_waits_for_a_read(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    engine = server.engine
    reader = engine.add(PROMPT)
    engine.plan()
    large = engine.add([7] * 155, 2)
    for _ in range(20):  # it cannot run to its end, and must not be admitted and retracted for ever
        engine.plan()
        if engine.sent:
            engine.absorb()
        server.checked()
    assert large not in engine.finished
    server.settle()
    assert {reader, large} <= set(engine.finished)


def test_a_full_disk_stops_writing_and_nothing_else(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.engine.disk.is_full = True
    for _ in range(2):
        server.answer([7] * 41)
    assert server.pages.error == "disk is full"
    server.restart()
    assert server.answer(PROMPT) == 40 and server.answer([7] * 41) == 0


def is_forgotten(server: Server) -> bool:
    """Whether neither index, journal nor file has a page or its tokens."""
    server.pages._journal.wait()
    records, _ = read_records((server.pages.directory.path / "journal").read_bytes())
    return not (len(server.pages.index) or records[1:] or server.slots)


@pytest.mark.parametrize("states", [0, 20], ids=["plain", "hybrid"])
def test_a_flush_forgets_what_is_on_disk(tmp_path: Path, states: int) -> None:
    server = Server(tmp_path / "cache", hybrid(kept_states=states))
    server.answer(PROMPT)
    server.answer(PROMPT)
    assert not is_forgotten(server)
    server.engine.scheduler.flush_cache()
    server.settle()
    assert is_forgotten(server) and server.answer(PROMPT) == 0
    server.restart()
    assert server.answer(PROMPT) == 0, "it was used once since"
    server.answer(PROMPT)
    server.restart()
    assert server.answer(PROMPT) == 40


def compute(server: Server, prompt: list[int]) -> None:
    """Run a request while the disk does nothing."""
    seq_id, engine = server.engine.add(prompt), server.engine
    while seq_id not in engine.finished:
        engine.plan()
        engine.absorb()
    engine.plan()


def test_a_page_that_is_being_written_at_a_flush_is_forgotten(server: Server) -> None:
    for _ in range(2):
        compute(server, PROMPT)
    assert server.pages._writing
    server.engine.scheduler.flush_cache()
    for prompt in ([7] * 41, [7] * 41, PROMPT):
        compute(server, prompt)
    server.settle()
    assert not is_on_disk(server, PROMPT) and is_on_disk(server, [7] * 41)
    server.restart()
    assert server.answer(PROMPT) == 0 and server.answer([7] * 41) == 40


def test_a_page_that_is_being_written_at_a_flush_can_be_written_again(server: Server) -> None:
    for _ in range(2):
        compute(server, PROMPT)
    server.engine.scheduler.flush_cache()
    for _ in range(2):
        compute(server, PROMPT)
    server.settle()
    server.restart()
    assert server.answer(PROMPT) == 40


def test_a_pinned_page_is_written_again_when_it_is_used_after_a_flush(server: Server) -> None:
    server.answer(PROMPT)
    server.engine.scheduler.state.kv.pin(np.array(PROMPT, np.int32), BASE_ROOT, 60.0)
    server.settle()
    server.engine.scheduler.flush_cache()
    server.settle()
    assert is_forgotten(server)
    server.answer(PROMPT)
    server.restart()
    assert server.answer(PROMPT) == 40


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_page_that_is_being_read_at_a_flush_is_only_for_an_open_request(
    server: Server, is_aborted: bool
) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    reader = server.engine.add(PROMPT)
    server.engine.plan()
    if is_aborted:
        server.engine.release(reader)
    server.engine.scheduler.flush_cache()
    server.settle()
    assert is_forgotten(server) == is_aborted == (server.engine.finished[reader] == "released")
    assert (server.engine.scheduler.state.kv.tree.num_pages == 0) == is_aborted
    index = server.checked().pages.index
    assert not is_aborted or sorted(index._free) == list(range(index._next)), "a slot is lost"


def test_two_requests_for_one_prefix_read_it_once(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    for _ in range(8):
        server.engine.add(PROMPT)
    server.settle()
    reads = server.engine.scheduler.state.reads
    assert reads is not None and reads.read_pages == 10


def test_a_sequence_that_waits_for_pages_holds_up_nobody(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    waiting = server.engine.add(PROMPT)
    other = server.engine.add([8] * 30)
    engine = server.engine
    while other not in engine.finished:
        engine.plan()
        engine.absorb()
    assert waiting not in engine.finished
    server.settle()
    assert waiting in engine.finished


def test_a_read_that_turns_out_slow_is_given_up(server: Server) -> None:
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    server.engine.disk.most_read = 3
    assert server.answer(PROMPT) == 12
    assert server.pages.damaged_pages == 0


def test_no_slot_beyond_the_quota_is_written(tmp_path: Path) -> None:
    server = Server(tmp_path / "cache", limits(num_pages=40), num_slots=12)
    for number in range(6):
        for _ in range(2):
            server.answer([number] * 33)
    assert len(server.pages.index) <= 12 and max(server.slots) < 12
    server.restart()
    assert server.answer([5] * 33) == 32, "the pages that were used last are there"


def hybrid(**changes: int) -> SchedulerLimits:
    """Of a model whose states are as large as three pages."""
    given = {"num_pages": 60, "kept_states": 20, "state_interval": 32, "state_bytes": 250}
    return limits(**given | changes)


def test_a_restarted_server_reads_pages_up_to_the_last_state(tmp_path: Path) -> None:
    server = Server(tmp_path / "cache", hybrid())
    server.answer(PROMPT)
    assert server.answer(PROMPT) == 0
    server.restart()
    assert server.answer(PROMPT) == 40
    assert server.answer([*PROMPT, 7, 8]) == 0, "pages and state are in memory now"


def test_pages_are_read_up_to_a_state_that_was_used(tmp_path: Path) -> None:
    """Other prompts leave the first one's behind the state of an interval."""
    server = Server(tmp_path / "cache", hybrid())
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    other, third = [*PROMPT[:36], 7, 8, 9, 10, 11], [*PROMPT[:36], 5, 6, 7, 8, 9]
    assert server.answer(other) == 0, "only the state at the end of a prompt was used"
    server.answer(third)
    server.restart()
    assert server.answer(other) == 32


def test_states_leave_memory_with_their_pages(tmp_path: Path) -> None:
    server = Server(tmp_path / "cache", hybrid(kept_states=60))
    server.answer(PROMPT)
    for number in range(3):
        server.answer([100 + number] * 150)
    assert server.answer(PROMPT) == 40


def test_a_damaged_part_of_a_state_is_computed_again(tmp_path: Path) -> None:
    server = Server(tmp_path / "cache", hybrid())
    server.answer(PROMPT)
    server.answer(PROMPT)
    server.restart()
    server.slots[sorted(server.slots)[-2]] = b"something else"
    server.answer(PROMPT)
    assert server.pages.damaged_pages == 1
    server.answer(PROMPT)
    server.restart()
    assert server.answer(PROMPT) == 40 and server.pages.damaged_pages == 0, "it was written again"


class DiskMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        spare=st.integers(0, 30),
        slots=st.sampled_from([3, 20, 1000]),
        running=st.integers(1, 5),
        states=st.sampled_from([0, 0, 5, 20]),
    )
    def begin(self, page_size: int, spare: int, slots: int, running: int, states: int) -> None:
        self.folder = tempfile.mkdtemp()
        of = limits(
            page_size=page_size,
            num_pages=-(-CONTEXT // page_size) + spare,
            context_length=CONTEXT,
            max_running_requests=running,
            kept_states=states,
            state_interval=2 * page_size,
            state_bytes=150,
        )
        self.server = Server(Path(self.folder) / "cache", of, num_slots=slots)

    @property
    def engine(self) -> EngineModel:
        return self.server.engine

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(0, 60),
        tail=st.lists(st.integers(0, 4), min_size=1, max_size=8),
        max_tokens=st.integers(0, 20),
        salt=st.sampled_from(["", "", "", "tenant"]),
        grammar=st.sampled_from([None, None, None, b"json"]),
    )
    def arrive(self, stem: list[int], cut: int, tail: list[int], max_tokens: int, **options: object) -> None:  # fmt: skip
        self.engine.add(stem[:cut] + tail, max_tokens, **options)  # type: ignore[arg-type]

    @rule()
    def load(self) -> None:
        self.engine.load_grammar()

    @precondition(lambda self: len(self.engine.sent) < 2)
    @rule()
    def plan(self) -> None:
        self.engine.plan()

    @precondition(lambda self: self.engine.sent)
    @rule(fail=st.sampled_from([False, False, False, True]))
    def absorb(self, fail: bool) -> None:
        self.engine.absorb(fail_first=fail)

    @rule()
    def move(self) -> None:
        self.engine.answer_order()

    @precondition(lambda self: set(self.engine.requests) - set(self.engine.finished))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ones = sorted(set(self.engine.requests) - set(self.engine.finished))
        self.engine.release(data.draw(st.sampled_from(open_ones)))

    @rule(is_awaited=st.booleans())
    def flush(self, is_awaited: bool) -> None:
        self.engine.scheduler.flush_cache()
        if is_awaited:
            self.engine._send_orders()
            while self.engine.answer_order():
                pass
        pages = self.server.pages
        pages._journal.wait()
        records, _ = read_records((pages.directory.path / "journal").read_bytes())
        assert not (len(pages.index) or records[1:] or any(pages._writing.values()))
        assert not (is_awaited and self.server.slots and not self.engine.orders)

    @precondition(lambda self: self.server.slots)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.server.slots)))
        self.server.slots[slot] = data.draw(
            st.sampled_from([b"", self.server.slots[slot][:-1], *self.server.slots.values()])
        )

    @rule(is_full=st.booleans(), most_read=st.sampled_from([1 << 30, 2]))
    def change_disk(self, is_full: bool, most_read: int) -> None:
        self.engine.disk.is_full, self.engine.disk.most_read = is_full, most_read

    @rule()
    def restart(self) -> None:
        self.server.restart()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "server"):
            self.server.checked()

    def teardown(self) -> None:
        if hasattr(self, "server"):
            self.server.settle()
            self.server.kill()
            shutil.rmtree(self.folder)


DiskMachine.TestCase.settings = settings(
    max_examples=EXAMPLES, stateful_step_count=60, deadline=None
)
TestDisk = DiskMachine.TestCase
