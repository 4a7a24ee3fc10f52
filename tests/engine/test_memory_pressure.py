"""The built-in model in a pool for hardly more than one request, with forks and clients that leave:
answers stay the same. ``make test-scheduler`` admits carefully and recklessly under each policy."""

import os
import random
from collections import deque
from pathlib import Path

import pytest

from radixrt import demo_model
from radixrt.base.sampling_params import SamplingParams
from radixrt.base.settings.setting import SchedulePolicyName
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import RequestOptions
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.queue.admission import Admission
from tests import batches
from tests.engine.in_process import InProcessEngine
from tests.scheduler.engine_model import expect_nothing

MODEL = Path(demo_model.__path__[0])
PROMPT_TOKENS, ANSWER_TOKENS, PAGE_SIZE = 48, 24, 4
STEMS = 4


def requests(rng: random.Random) -> list[SequenceRequest]:
    """Sixty, on four stems that fork at every length; of different length and urgency."""
    stems = [[rng.randrange(3, 2048) for _ in range(PROMPT_TOKENS - 6)] for _ in range(STEMS)]
    return [
        SequenceRequest(
            seq_id=seq_id,
            token_ids=pack_ids([*rng.choice(stems)[: rng.randint(0, 42)], 5, 6 + seq_id % 7]),
            options=RequestOptions(
                sampling=SamplingParams(
                    temperature=0.0, max_tokens=rng.randint(1, ANSWER_TOKENS), ignore_eos=True
                ),
                priority=rng.randint(-1, 1),
            ),
        )
        for seq_id in range(60)
    ]


def alone(wanted: list[SequenceRequest]) -> dict[int, list[int]]:
    """Each answered when nobody else was there, without a cache."""
    engine = InProcessEngine(MODEL, dtype="float32", disable_radix_cache=True)
    return {
        request.seq_id: engine.generate([unpack_ids(request.token_ids).tolist()], request.sampling)[
            0
        ]
        for request in wanted
    }


def answers_in_a_crowd(
    engine: InProcessEngine, wanted: list[SequenceRequest], leave: set[int], rng: random.Random
) -> tuple[dict[int, list[int]], set[int]]:
    """Answers of requests that come a few a step, of which some leave; and who finished."""
    scheduler, to_come = engine.scheduler, deque(wanted)
    answers: dict[int, list[int]] = {request.seq_id: [] for request in wanted}
    finished: set[int] = set()
    while (
        to_come or scheduler.num_in_flight or scheduler.num_running or len(scheduler.state.waiting)
    ):
        for _ in range(min(len(to_come), rng.randint(0, 4))):
            assert scheduler.add(to_come.popleft()) is None
        for batch in engine.advance():
            for seq_id, output in batch.outputs.items():
                answers[seq_id] += output.token_ids
            finished.update(batches.finished(batch))
            gone = [seq_id for seq_id in leave - finished if len(answers[seq_id]) > seq_id % 5]
            scheduler.release(unpack_ids(pack_ids(gone)))
    return answers, finished


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[int]]:
    return alone(requests(random.Random(5)))


CASES = [("lpm", False), ("priority", True)]
if "RADIXRT_SCHEDULER_EXAMPLES" in os.environ:
    CASES += [(policy, not careful) for policy, careful in CASES]


@pytest.mark.parametrize(("policy", "careful"), CASES)
def test_answers_in_a_crowd_are_those_of_an_idle_engine(
    policy: SchedulePolicyName,
    careful: bool,
    undisturbed: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not careful:
        monkeypatch.setattr(Admission, "_forecast", expect_nothing)
    rng = random.Random(9)
    wanted = requests(random.Random(5))
    need = max(len(r.token_ids) // 4 + (r.sampling.max_tokens or 0) for r in wanted)
    engine = InProcessEngine(
        MODEL,
        dtype="float32",
        page_size=PAGE_SIZE,
        max_total_tokens=round(1.2 * need),
        schedule_policy=policy,
    )
    leave = set(rng.sample(range(len(wanted)), 8))
    answers, finished = answers_in_a_crowd(engine, wanted, leave, rng)
    assert finished >= answers.keys() - leave and not leave <= finished
    for seq_id, answer in answers.items():
        expected = undisturbed[seq_id]
        assert answer == (expected if seq_id in finished else expected[: len(answer)])
    scheduler = engine.scheduler
    assert careful or scheduler.state.counters.retractions > 10
    scheduler.flush_cache()
    assert scheduler.state.kv.allocator.num_free == scheduler.state.limits.num_pages
