"""Prompts that are only prefilled, and what is said of who put what into the cache."""

import random

from radixrt.messages.ids import unpack_ids
from tests.batches import finished, started
from tests.scheduler.engine_model import EngineModel, limits

DOCUMENT = [i * 7 % 43 for i in range(101)]


def test_a_prompt_without_an_answer_fills_the_cache_and_says_nothing() -> None:
    model = EngineModel(limits())
    warm = model.add(DOCUMENT, max_tokens=0)
    batches = []
    while model.plan() is not None:
        batches.append(model.absorb())
    last = batches[-1]
    assert [*started(last)] == [*finished(last)] == [warm]
    report = finished(last)[warm]
    assert report.finish_reason == "length" and report.stop_reason is None
    assert not any(batch.num_tokens for batch in batches)
    assert (model.cached[warm], model.written[warm]) == (0, 100)
    answered = model.add([*DOCUMENT, 1, 2], max_tokens=3)
    model.run()
    assert (model.cached[answered], model.written[answered]) == (100, 0)
    assert model.scheduler.state.counters.output_tokens == len(model.answers[answered])


def test_nothing_is_learned_about_answers_from_prompts_that_want_none() -> None:
    model = EngineModel(limits())
    for first in range(5):
        model.add([first] * 9, max_tokens=0)
    model.run()
    assert model.scheduler.state.outputs.mean() is None


def test_every_page_that_prompts_bring_into_the_tree_is_counted_once() -> None:
    rng = random.Random(5)
    model = EngineModel(limits(num_pages=2000, max_prefill_tokens=40, chunked_prefill_size=16))
    for _ in range(60):
        cut = rng.randrange(100)
        prompt = DOCUMENT[:cut] + [rng.randrange(3) for _ in range(rng.randint(1, 30))]
        model.add(prompt, max_tokens=0)
        if rng.random() < 0.5:
            model.plan()
            model.absorb()
    model.run()
    tree = model.scheduler.state.kv.tree
    assert sum(model.written.values()) == tree.num_pages * 4
    assert model.scheduler.stats().cache_write_tokens == tree.num_pages * 4
    for seq_id, request in model.requests.items():
        computed = len(unpack_ids(request.token_ids)) - model.cached[seq_id]
        # the last page may have been computed beside another's, or not be full
        assert computed - 2 * 4 < model.written[seq_id] <= computed


def test_what_is_found_again_after_a_retraction_is_not_counted_twice() -> None:
    tale = [12, 8, 3, 22, 21, 1, 9, 28, 25, 30, 37, 25, 8, 22, 14, 5, 32, 0, 40, 32, 12, 33, 3]
    song = [31, 24, 0, 39, 5, 18, 31, 14, 11, 32, 14, 14, 29, 2, 23, 0]
    prompts = [
        (tale[:7], 13), ([*tale[:9], 0], 0), ([*tale[:6], 4], 19), (tale, 1), ([*song[:7], 4], 18),
        ([*song[:12], 1], 13), ([*tale[:18], 3], 7), (song[:14], 2), ([*tale[:9], 2], 4), (song, 7),
    ]  # fmt: skip
    model = EngineModel(
        limits(num_pages=7, max_prefill_tokens=16, chunked_prefill_size=4), reckless=True
    )
    for prompt, max_tokens in prompts:
        model.add(prompt, max_tokens)
    model.run()
    assert model.scheduler.state.counters.retractions
    assert all(model.cached[seq_id] < len(prompt) for seq_id, (prompt, _) in enumerate(prompts))
    assert min(model.written.values()) >= 0
