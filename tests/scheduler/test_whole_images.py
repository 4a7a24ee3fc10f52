"""Images whose tokens see one another in both directions: a step computes all of one or nothing of
it."""

import random

import pytest

from radixrt.messages.images import ImageRun
from radixrt.messages.steps import StepPlan
from tests.scheduler.engine_model import EngineModel, limits

PROMPT = [i * 7 % 43 for i in range(40)]
PAGE = 4


def model(**changes: object) -> EngineModel:
    return EngineModel(limits(whole_images=True, page_size=PAGE, **changes))


def image(start: int, num_tokens: int, number: int = 0) -> ImageRun:
    return ImageRun(bytes([number]) * 32, start, num_tokens)


def step(engine: EngineModel) -> StepPlan:
    """Plan and compute one step."""
    plan = engine.plan()
    assert plan is not None
    engine.absorb()
    return plan


def chunks_of(engine: EngineModel) -> list[tuple[int, int]]:
    """Beginning and end of each chunk that was planned."""
    chunks = (chunk for plan in engine.plans for chunk in plan.prefill)
    return [(chunk.start, chunk.start + chunk.num_tokens) for chunk in chunks]


def test_an_image_may_end_a_chunk_and_a_hit() -> None:
    """Nothing of it is computed with what is behind it, or again."""
    engine = model(chunked_prefill_size=12, max_prefill_tokens=12)
    engine.add(PROMPT[:13], images=[image(4, 8)])
    engine.run()
    assert chunks_of(engine) == [(0, 12), (12, 13)]
    longer = engine.add(PROMPT[:20], images=[image(4, 8)])
    engine.run()
    assert engine.cached[longer] == 12
    inside = engine.add([*PROMPT[:13], 45, 46, 47], images=[image(4, 12)])
    engine.run()
    assert engine.cached[inside] == 4, "of another image, only what is before it"


def test_pages_that_end_inside_an_image_are_not_adopted_at_its_beginning() -> None:
    """They save nothing: all of it is computed anyway."""
    engine = model(chunked_prefill_size=8, max_prefill_tokens=21)
    for end in (30, 19):
        engine.add(PROMPT[:end], images=[image(6, 12)])
    step(engine)
    assert chunks_of(engine) == [(0, 6), (4, 18)], "the shorter one is at the image's end"
    second = step(engine)
    assert (6, 18) in chunks_of(engine)
    assert not second.block_tables
    engine.run()


@pytest.mark.parametrize("seed", range(4))
def test_no_step_splits_an_image_where_pages_are_few(seed: int) -> None:
    """Answers that run take the pages of one that is to be computed, which waits for them then."""
    choose = random.Random(seed)
    engine = EngineModel(
        limits(
            whole_images=True,
            page_size=PAGE,
            num_pages=24,
            chunked_prefill_size=8,
            max_prefill_tokens=16,
        ),
        reckless=True,
    )
    for number in range(30):
        text = [choose.randrange(50) for _ in range(choose.randrange(1, 12))]
        count = choose.randrange(5, 30)
        prompt = [*text, *[number % 7] * count, *text[: choose.randrange(3) + 1]]
        images = [image(len(text), count, number % 7)]
        engine.add(prompt, choose.randrange(1, 40), images=images, ignore_eos=True)
    while engine.plan() is not None or engine.sent:
        slots = engine.scheduler.state.slots
        for chunk in engine.sent[-1].prefill if engine.sent else ():
            sequence = slots.sequences[chunk.slot]
            end = chunk.start + chunk.num_tokens
            assert end <= slots.num_pages[chunk.slot] * PAGE
            for run in sequence.images:
                assert not run.start < end < run.start + run.num_tokens
                assert not run.start < chunk.start < run.start + run.num_tokens
        engine.absorb()
    assert engine.finished.keys() == engine.requests.keys()
    assert engine.scheduler.state.counters.retractions
