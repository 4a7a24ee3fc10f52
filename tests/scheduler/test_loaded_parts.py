"""The grammars and images that a scheduler was sent: who waits for them, and who is refused without
them."""

from pathlib import Path

import msgspec
import pytest

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.grammar import Grammar
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, GrammarUse, LoadGrammar
from radixrt.messages.ids import pack_ids
from radixrt.messages.images import DropImage, HurryImage, ImageLoaded, ImageRun, LoadImage
from radixrt.messages.requests import IdleKind, RequestOptions
from radixrt.messages.sequences import SequenceRefused, SequenceRequest
from radixrt.scheduler.scheduler import Scheduler
from tests.scheduler.engine_model import EngineModel, limits

GRAMMAR = Grammar.compiled("llguidance", b"source")
KEY = GRAMMAR.key


@pytest.fixture
def scheduler() -> Scheduler:
    """With two ranks."""
    return Scheduler(limits(num_ranks=2))


def add(scheduler: Scheduler, seq_id: int, key: bytes = KEY) -> SequenceRefused | None:
    return scheduler.add(
        SequenceRequest(
            seq_id=seq_id,
            token_ids=pack_ids([1, 2, 3]),
            options=RequestOptions(sampling=SamplingParams(max_tokens=4)),
            grammar=GrammarUse(key),
        )
    )


def test_sequences_wait_until_every_rank_has_loaded_their_grammar(scheduler: Scheduler) -> None:
    scheduler.grammars.load(LoadGrammar(GRAMMAR))
    assert scheduler.grammars.take_orders() == [LoadGrammar(GRAMMAR)]
    assert add(scheduler, 0) is None and add(scheduler, 1) is None
    assert scheduler.loaded(GrammarLoaded(key=KEY)) == []
    assert scheduler.plan() is None and scheduler.grammars.num_waiting == 2
    assert scheduler.loaded(GrammarLoaded(key=KEY)) == []
    plan = scheduler.plan()
    assert plan is not None and [admit.grammar for admit in plan.admit] == [GrammarUse(KEY)] * 2
    assert add(scheduler, 2) is None and scheduler.grammars.num_waiting == 0
    assert scheduler.grammars.take_orders() == [], "it was loaded once"


@pytest.mark.parametrize("errors", [("damaged", None), (None, "damaged"), ("damaged", "again")])
def test_a_rank_that_can_not_load_it_refuses_each_waiting_sequence(
    scheduler: Scheduler, errors: tuple[str | None, str | None]
) -> None:
    scheduler.grammars.load(LoadGrammar(GRAMMAR))
    for seq_id in range(3):
        assert add(scheduler, seq_id) is None
    first, second = (GrammarLoaded(key=KEY, error=error) for error in errors)
    assert scheduler.loaded(first) == []
    refused = scheduler.loaded(second)
    assert [one.seq_id for one in refused] == [0, 1, 2]
    assert {(one.message, one.status, one.grammar_lost) for one in refused} == {
        ("damaged", 400, True)
    }
    late = add(scheduler, 3)  # was on its way
    assert late is not None and (late.message, late.grammar_lost) == ("damaged", True)
    assert scheduler.state.counters.refused == 4 and scheduler.grammars.num_waiting == 0
    assert scheduler.plan() is None

    scheduler.grammars.drop(DropGrammar(KEY))  # what the tokenizer process does then
    scheduler.grammars.load(LoadGrammar(GRAMMAR))
    orders = [LoadGrammar(GRAMMAR), DropGrammar(KEY), LoadGrammar(GRAMMAR)]
    assert scheduler.grammars.take_orders() == orders
    assert add(scheduler, 4) is None
    for _ in range(2):
        assert scheduler.loaded(GrammarLoaded(key=KEY)) == []
    assert scheduler.plan() is not None


@pytest.mark.parametrize("key", [b"", b"\xff", KEY])
def test_an_unknown_key_refuses_its_request_alone(scheduler: Scheduler, key: bytes) -> None:
    refused = add(scheduler, 0, key)
    assert refused is not None and (refused.status, refused.grammar_lost) == (500, True)
    scheduler.grammars.drop(DropGrammar(key))  # ignored
    assert scheduler.grammars.take_orders() == [] and len(scheduler.grammars) == 0
    engine = EngineModel(limits())
    engine.scheduler.add(
        SequenceRequest(
            seq_id=99,
            token_ids=pack_ids([1]),
            options=RequestOptions(sampling=SamplingParams(max_tokens=4)),
            grammar=GrammarUse(key),
        )
    )
    engine.add([1, 2, 3])
    engine.run()


def test_a_drop_waits_for_the_answers_of_all_ranks(scheduler: Scheduler) -> None:
    """Else an answer to the first load could pass for one to the second."""
    grammars = scheduler.grammars
    grammars.load(LoadGrammar(GRAMMAR))
    grammars.drop(DropGrammar(KEY))
    scheduler.loaded(GrammarLoaded(key=KEY))
    assert grammars.take_orders() == [LoadGrammar(GRAMMAR)]
    scheduler.loaded(GrammarLoaded(key=KEY))
    assert grammars.take_orders() == [DropGrammar(KEY)] and len(grammars) == 0


def test_a_grammar_sent_again_while_it_is_loaded_stays(scheduler: Scheduler) -> None:
    grammars = scheduler.grammars
    grammars.load(LoadGrammar(GRAMMAR))
    scheduler.loaded(GrammarLoaded(key=KEY))
    grammars.drop(DropGrammar(KEY))
    grammars.load(LoadGrammar(GRAMMAR))
    assert add(scheduler, 0) is None
    scheduler.loaded(GrammarLoaded(key=KEY))
    assert grammars.take_orders() == [LoadGrammar(GRAMMAR)]
    assert scheduler.plan() is not None


def test_who_leaves_while_it_waits_is_not_queued(scheduler: Scheduler) -> None:
    engine = EngineModel(limits())
    gone, stays = engine.add([1, 2], grammar=b"json"), engine.add([1, 3], grammar=b"json")
    engine.release(gone)
    engine.run()
    assert engine.finished[gone] == "released" and engine.answers[gone] == []
    assert engine.finished[stays] in ("stop", "length") and engine.num_loads == 1


def test_a_dropped_grammar_is_loaded_again_when_it_is_sent_again() -> None:
    engine = EngineModel(limits())  # keeps one unused grammar
    for source in (b"json", b"regex", b"json", b"json"):
        engine.add([1, 2, 3], grammar=source)
        engine.run()
    assert engine.num_loads == 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_sequence_waits_until_every_rank_has_seen_all_of_its_images(
    scheduler: Scheduler, order: tuple[int, int]
) -> None:
    keys = [bytes([number]) * 32 for number in range(2)]
    for key in keys:
        scheduler.images.load(LoadImage(key=key, pixels=b"", shape=(0,)))
    request = SequenceRequest(
        seq_id=0,
        token_ids=pack_ids([*range(9)]),
        images=[ImageRun(key, 4 * number, 4) for number, key in enumerate(keys)],
        options=RequestOptions(sampling=SamplingParams(max_tokens=4)),
    )
    assert scheduler.add(request) is None
    for number in order:
        for _ in range(2):
            assert scheduler.plan() is None
            assert scheduler.loaded(ImageLoaded(key=keys[number])) == []
    plan = scheduler.plan()
    assert plan is not None and len(plan.admit) == 1


def test_the_file_of_a_large_image_is_removed_when_every_rank_has_read_it(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    images, key = scheduler.images, bytes(32)
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    for file in (first, again, other):
        file.write_bytes(b"pixels")

    def load(file: Path, key: bytes = key) -> None:
        images.load(LoadImage(key=key, pixels=b"", shape=(0,), file=str(file)))

    load(first)
    scheduler.loaded(ImageLoaded(key=key))
    images.drop(DropImage(key))
    load(again)
    assert first.exists() and again.exists(), "one is still being read"
    load(other, bytes(31) + b"1")
    scheduler.loaded(ImageLoaded(key=key))
    assert not first.exists() and not again.exists() and other.exists()
    load(again)
    images.drop(DropImage(bytes(31) + b"1"))
    for _ in range(2):
        scheduler.loaded(ImageLoaded(key=bytes(31) + b"1"))
    assert not other.exists() and len(images) == 1


@pytest.mark.parametrize("failed", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("idle", ["", "expected"])
def test_an_image_whose_file_went_with_its_tokenizer_process_is_read_from_the_next_one(
    scheduler: Scheduler, tmp_path: Path, failed: tuple[int, ...], idle: IdleKind
) -> None:
    images, key, lost = scheduler.images, bytes(32), "the file is lost"
    request = SequenceRequest(
        seq_id=0,
        token_ids=pack_ids([*range(9)]),
        images=[ImageRun(key, 0, 4)],
        options=RequestOptions(sampling=SamplingParams(max_tokens=4)),
    )

    def load(name: str, idle: IdleKind = "") -> LoadImage:
        (tmp_path / name).write_bytes(b"pixels")
        file = str(tmp_path / name)
        order = LoadImage(key=key, pixels=b"", shape=(0,), file=file, idle=idle)
        images.load(order)
        return order

    def answer(rank: int) -> list[SequenceRefused]:
        return scheduler.loaded(ImageLoaded(key=key, error=lost if rank in failed else None))

    first = load("first")
    (tmp_path / "first").unlink()
    images.drop_all()
    load("second")
    last = load("last", idle)
    assert not (tmp_path / "second").exists()
    assert scheduler.add(request) is None
    images.hurry(HurryImage(key))
    assert [one for one in images.take_orders() if isinstance(one, LoadImage)] == [first]
    for rank in range(2):
        assert answer(rank) == [] and scheduler.plan() is None
    assert images.take_orders() == [DropImage(key), msgspec.structs.replace(last, idle="")]
    failed = ()
    for rank in range(2):
        assert (tmp_path / "last").exists()
        assert answer(rank) == []
    plan = scheduler.plan()
    assert plan is not None and len(plan.admit) == 1
    assert not list(tmp_path.iterdir()) and images.take_orders() == []


def test_an_image_is_loaded_from_the_next_file_once_and_not_when_it_is_dropped(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    images, key = scheduler.images, bytes(32)
    order = LoadImage(key=key, pixels=b"", shape=(0,), file=str(tmp_path / "file"))
    for is_dropped in (False, True):
        images.load(order)
        images.load(order)
        if is_dropped:
            images.drop(DropImage(key))
        for _ in range(4 - 2 * is_dropped):
            scheduler.loaded(ImageLoaded(key=key, error="damaged"))
        refused = images.refusal(0, key)
        assert refused is not None and (refused.message == "damaged") is not is_dropped
        images.drop(DropImage(key))
        assert len(images) == 0


def test_an_answer_hurries_an_image_that_was_dropped_while_it_was_for_idle_times(
    scheduler: Scheduler,
) -> None:
    images, key = scheduler.images, bytes(32)
    load = LoadImage(key=key, pixels=b"", shape=(0,), idle="expected")
    images.load(load)
    images.drop(DropImage(key))
    images.load(load)
    assert images.take_orders() == [load]
    images.drop(DropImage(key))
    images.load(msgspec.structs.replace(load, idle=""))
    assert images.take_orders() == [HurryImage(key)]


def test_an_image_is_hurried_while_a_rank_works_on_it(scheduler: Scheduler) -> None:
    images, key = scheduler.images, bytes(32)
    load, hurry = LoadImage(key=key, pixels=b"", shape=(0,), idle="expected"), HurryImage(key)
    images.hurry(hurry)
    assert images.take_orders() == [], "nothing is known of it"
    images.load(load)
    scheduler.loaded(ImageLoaded(key=key))
    images.hurry(hurry)
    assert images.take_orders() == [load, hurry]
    scheduler.loaded(ImageLoaded(key=key))
    images.hurry(hurry)
    assert images.take_orders() == []
