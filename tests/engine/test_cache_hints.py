"""The built-in model: whatever clients say of the cache, the answers are those of an engine without
one."""

import random
from pathlib import Path

import msgspec
import pytest

from radixrt import demo_model
from radixrt.base.errors import RequestError
from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.ids import pack_ids, unpack_ids
from radixrt.messages.requests import CacheHints, RequestOptions, Retention
from radixrt.messages.sequences import SequenceRequest
from tests.engine.in_process import GREEDY, InProcessEngine

MODEL = Path(demo_model.__path__[0])
PAGE_SIZE = 4
WARM = msgspec.structs.replace(GREEDY, max_tokens=0)


def some_requests(rng: random.Random) -> list[SequenceRequest]:
    """Twenty-five in four sessions, each forking its session's document."""
    documents = [[rng.randrange(3, 2048) for _ in range(60)] for _ in range(4)]
    requests = []
    for seq_id in range(25):
        session = rng.randrange(4)
        prompt = [*documents[session][: rng.randint(10, 60)], 5, 6 + seq_id % 7]
        hints = CacheHints(
            retain=[
                Retention(
                    rng.choice(["none", "default", "high"]),
                    rng.choice([None, rng.randint(1, 60)]),
                    rng.choice([None, 0.01, 10.0]),
                )
            ],
            next_use_s=rng.choice([None, 0.01, 5.0]),
            session=f"session {session}",
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=rng.randint(0, 8), ignore_eos=True)
        requests.append(
            SequenceRequest(
                seq_id=seq_id,
                token_ids=pack_ids(prompt),
                options=RequestOptions(sampling=sampling, cache_hints=hints),
            )
        )
    return requests


@pytest.fixture(scope="module")
def wanted() -> list[tuple[SequenceRequest, list[int]]]:
    """Requests, and what an engine without a cache answers."""
    plain = InProcessEngine(MODEL, dtype="float32", disable_radix_cache=True)
    return [
        (request, plain.generate([unpack_ids(request.token_ids).tolist()], request.sampling)[0])
        for request in some_requests(random.Random(11))
    ]


@pytest.mark.parametrize("eviction_policy", ["lru", "priority"])
def test_random_hints_pins_and_ends_of_sessions_change_no_answer(
    eviction_policy: str, wanted: list[tuple[SequenceRequest, list[int]]]
) -> None:
    rng = random.Random(12)
    hinted = InProcessEngine(
        MODEL,
        dtype="float32",
        page_size=PAGE_SIZE,
        max_total_tokens=160,
        eviction_policy=eviction_policy,
    )
    kv, given = hinted.scheduler.state.kv, 0
    for request, expected in wanted:
        prompt = unpack_ids(request.token_ids)
        assert len(expected) == request.sampling.max_tokens
        assert hinted._run([request]) == [expected]
        if rng.random() < 0.3:
            try:
                kv.leases.pin(prompt, BASE_ROOT, 60.0)
                given += 1
            except RequestError as refused:
                assert refused.status == 429
        if rng.random() < 0.2:
            hinted.scheduler.release_session(request.options.cache_hints.session)
    assert given and kv.evicted_pages and kv.tree.num_pinned_pages <= 20


def test_a_warmed_prompt_is_computed_once() -> None:
    engine = InProcessEngine(MODEL, dtype="float32", page_size=PAGE_SIZE)
    prompt = list(range(100, 141))
    [expected] = InProcessEngine(MODEL, dtype="float32").generate([prompt])
    assert engine.generate([prompt], WARM) == [[]]
    assert engine.cached == [0]
    assert engine.generate([prompt]) == [expected]
    assert engine.cached == [40]
