"""Equal answers are computed once, and each client gets the tokens that it would get alone: the
engine model compares every answer with an undisturbed one."""

import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from radixrt.base.sampling_params import SamplingParams
from radixrt.messages.ids import pack_ids
from radixrt.messages.requests import CacheHints, RequestOptions, Retention, Tenant
from radixrt.messages.sequences import SequenceRequest
from radixrt.scheduler.shared_answers import answer_key
from tests.scheduler.engine_model import EngineModel, limits

PROMPT = [i * 7 % 43 for i in range(30)]
ANNA, BERT = Tenant(name="anna"), Tenant(name="bert")


def computed(model: EngineModel) -> int:
    """Tokens that the worker has generated for clients."""
    return model.scheduler.state.counters.output_tokens


def release(model: EngineModel, seq_id: int, *, complete: bool = False) -> None:
    model.scheduler.release(np.array([seq_id], dtype=np.int32), complete=complete)
    model._end(seq_id, "released")


def step_without(model: EngineModel, gone: set[int]) -> bool:
    """One step; tokens for clients that have left are dropped, as by the tokenizer process."""
    if model.plan() is None:
        return False
    batch = model.scheduler.absorb(model.worker.step(model.sent.popleft()))
    for seq_id in gone & batch.outputs.keys():
        del batch.outputs[seq_id]
    model._take(batch)
    return True


def finish_without(model: EngineModel, gone: set[int]) -> None:
    while step_without(model, gone):
        pass


def test_64_equal_requests_in_flight_are_one_sequence() -> None:
    model = EngineModel(limits(max_queued_requests=2))
    first = model.add(PROMPT, max_tokens=20, shares=True)
    model.plan()
    model.absorb()
    others = [model.add(PROMPT, max_tokens=20, shares=True) for _ in range(63)]
    model.run()
    assert all(model.answers[other] == model.answers[first] for other in others)
    assert sum(len(plan.admit) for plan in model.plans) == 1
    assert computed(model) == len(model.answers[first])


def test_64_nearly_equal_requests_are_64_sequences() -> None:
    model = EngineModel(limits(max_queued_requests=100, num_pages=1000))
    changes = [
        *({"seed": seed, "temperature": 0.5} for seed in range(20)),
        *({"presence_penalty": value / 20} for value in range(20)),
        *({"stop_token_ids": (token,)} for token in range(20)),
        {"ignore_eos": True}, {"min_tokens": 2}, {"stop": ("x",)}, {"logit_bias": {1: 2.0}},
    ]  # fmt: skip
    for change in changes:
        model.add(PROMPT, max_tokens=6, shares=True, **change)
    model.run()
    assert sum(len(plan.admit) for plan in model.plans) == 64
    assert model.scheduler.state.counters.replayed_tokens == 0


def test_other_tokens_salts_keys_and_lengths_are_other_answers() -> None:
    model = EngineModel(limits(num_pages=1000))
    model.add(PROMPT, shares=True)
    model.add([*PROMPT[:-1], 1], shares=True)
    model.add(PROMPT, salt="b", shares=True)
    model.add(PROMPT, shares=True, tenant=ANNA)
    model.add(PROMPT, shares=True, tenant=BERT)
    model.add(PROMPT, max_tokens=5, shares=True)
    model.add(PROMPT, num_output=3, shares=True)
    model.add(PROMPT)
    model.run()
    assert sum(len(plan.admit) for plan in model.plans) == 8
    assert model.scheduler.state.counters.replayed_tokens == 0


def test_another_image_is_another_answer() -> None:
    """Its placeholders are the same tokens."""
    request = SequenceRequest(
        seq_id=1,
        token_ids=pack_ids(PROMPT),
        key_ids=pack_ids([-5, -6]),
        options=RequestOptions(sampling=SamplingParams(max_tokens=3), shares_answers=True),
    )
    other = replace(request, key_ids=pack_ids([-5, -7]))
    assert answer_key(request) == answer_key(replace(request, seq_id=2)) != answer_key(other)


def test_a_finished_answer_is_given_again_without_a_step() -> None:
    model = EngineModel(limits())
    first = model.add(PROMPT, max_tokens=9, shares=True, tenant=ANNA)
    model.run()
    steps = len(model.plans)
    again = model.add(PROMPT, max_tokens=9, shares=True, tenant=ANNA)
    shorter = model.add(PROMPT, max_tokens=3, shares=True, tenant=ANNA)
    assert {again, shorter} <= model.finished.keys()
    assert len(model.plans) == steps
    assert model.answers[again] == model.answers[first]
    assert model.answers[shorter] == model.answers[first][:3]
    assert (model.finished[first], model.finished[again]) == ("stop", "stop")
    assert model.finished[shorter] == "length"
    other = model.add(PROMPT, max_tokens=9, shares=True, tenant=BERT)
    assert other not in model.finished
    model.run()


def test_a_tenant_waits_as_long_whatever_another_has_asked() -> None:
    """Each has its own namespace, so not even the prompt's KV is shared."""
    anna = Tenant(name="anna", cache_namespace="key:anna")
    bert = Tenant(name="bert", cache_namespace="key:bert")

    def steps_beside(prompt: list[int]) -> list[tuple[list[int], int]]:
        """The steps in which an answer to bert is computed: its chunks, and the slots in use."""
        model = EngineModel(limits(num_pages=200))
        settings: dict[str, Any] = {"max_tokens": 12, "shares": True, "ignore_eos": True}
        model.add(prompt, tenant=anna, **settings)
        model.run()
        model.add(prompt, tenant=anna, seed=3, **settings)  # is computed while bert asks
        model.plan()
        model.absorb()
        seen = []
        own = [model.add(PROMPT, tenant=bert, seed=seed, **settings) for seed in (None, 3)]
        while not set(own) <= model.finished.keys():
            plan = model.plan()
            assert plan is not None
            model.absorb()
            chunks = [chunk.num_tokens for chunk in plan.prefill]
            seen.append((chunks, model.scheduler.num_running))
        model.run()
        return seen

    other = [(token + 1) % 43 for token in PROMPT]
    assert steps_beside(PROMPT) == steps_beside(other)


def test_a_longer_answer_goes_on_from_the_stored_end() -> None:
    model = EngineModel(limits())
    first = model.add(PROMPT, max_tokens=5, shares=True, ignore_eos=True)
    model.run()
    before = computed(model)
    longer = model.add(PROMPT, max_tokens=12, shares=True, ignore_eos=True)
    assert model.answers[longer] == model.answers[first]
    model.run()
    assert len(model.answers[longer]) == 12
    assert model.scheduler.state.counters.output_tokens == before + 7
    again = model.add(PROMPT, max_tokens=12, shares=True, ignore_eos=True)
    assert model.answers[again] == model.answers[longer]


def test_what_the_tree_has_lost_is_computed_again() -> None:
    model = EngineModel(limits(num_pages=24))
    model.add(PROMPT, max_tokens=9, shares=True)
    model.run()
    model.add([3] * 90, max_tokens=1)
    model.run()
    steps = len(model.plans)
    again = model.add(PROMPT, max_tokens=9, shares=True)
    assert again not in model.finished
    model.run()
    assert len(model.plans) > steps
    model.scheduler.flush_cache()
    assert model.add(PROMPT, max_tokens=9, shares=True) not in model.finished
    model.run()


def test_the_sequence_goes_on_until_its_last_client_leaves() -> None:
    model = EngineModel(limits())
    first = model.add(PROMPT, max_tokens=40, shares=True, ignore_eos=True)
    second = model.add(PROMPT, max_tokens=40, shares=True, ignore_eos=True)
    for _ in range(6):
        model.plan()
        model.absorb()
    release(model, first)
    third = model.add(PROMPT, max_tokens=40, shares=True, ignore_eos=True)
    assert model.answers[third] == model.answers[second]
    finish_without(model, {first})
    assert len(model.answers[third]) == 40
    lonely = [model.add(PROMPT[:9], max_tokens=40, shares=True) for _ in range(2)]
    model.plan()
    for one in lonely:
        release(model, one)
    assert model.scheduler.num_running == 0
    model.run()


def test_a_subscriber_that_leaves_takes_nothing_from_the_first_client() -> None:
    model = EngineModel(limits())
    first = model.add(PROMPT, max_tokens=40, shares=True, ignore_eos=True)
    second = model.add(PROMPT, max_tokens=40, shares=True, ignore_eos=True)
    model.plan()
    release(model, second)
    model.run()
    assert len(model.answers[first]) == 40 and model.answers[second] == []


def test_a_refused_sequence_is_refused_for_all() -> None:
    model = EngineModel(limits())
    model.add(PROMPT, shares=True)
    others = [model.add(PROMPT, shares=True) for _ in range(3)]
    model.plan()
    batch = model.absorb(fail_first=True)
    assert {refused.seq_id for refused in batch.refused} == {0, *others}
    model.run()


def test_an_answer_that_a_stop_string_ended_is_given_again() -> None:
    model = EngineModel(limits())
    first = model.add(PROMPT, max_tokens=30, shares=True, stop=("x",), ignore_eos=True)
    for _ in range(5):
        model.plan()
        model.absorb()
    release(model, first, complete=True)
    model.run()
    again = model.add(PROMPT, max_tokens=30, shares=True, stop=("x",), ignore_eos=True)
    assert model.answers[again] == model.answers[first]
    release(model, again, complete=True)
    model.run()


def test_a_replayed_answer_leaves_the_hints_of_its_request() -> None:
    model = EngineModel(limits(num_pages=24))
    model.add(PROMPT, max_tokens=9, shares=True)
    model.run()
    model.add(PROMPT, max_tokens=9, shares=True, cache_hints=CacheHints(retain=[Retention("high")]))
    model.add([2] * 50, max_tokens=1)
    model.run()
    model.add([3] * 60, max_tokens=1)
    model.run()
    assert model.add(PROMPT, max_tokens=9, shares=True) in model.finished


@pytest.mark.parametrize("seed", range(6))
def test_random_clients_get_the_answers_that_they_would_get_alone(seed: int) -> None:
    rng = random.Random(seed)
    model = EngineModel(limits(num_pages=40, max_running_requests=3))
    tenants = [ANNA, BERT]
    left: set[int] = set()
    for _ in range(150):
        if rng.random() < 0.4:
            prompt = PROMPT[: rng.choice([5, 17, 30])]
            most = rng.choice([3, 8, 20])
            model.add(prompt, most, shares=True, tenant=rng.choice(tenants), ignore_eos=rng.random() < 0.5)  # fmt: skip
        open_ids = model.requests.keys() - model.finished.keys()
        if open_ids and rng.random() < 0.1:
            leaver = rng.choice(sorted(open_ids))
            release(model, leaver)
            left.add(leaver)
        step_without(model, left)
    finish_without(model, left)
    assert model.finished.keys() == model.requests.keys()
    assert model.scheduler.state.counters.replayed_tokens > 0
    answers = model.scheduler.answers
    assert not answers._by_seq_id and not answers._in_flight
