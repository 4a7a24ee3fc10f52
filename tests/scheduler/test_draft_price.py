"""The price of a draft row is learned from step times, in a batch that hardly changes and in spite of noise."""

import random
from itertools import pairwise

import pytest

from radixrt.messages.steps import NO_DRAFTS, StepPlan
from radixrt.scheduler.drafts.price import DraftPrice
from radixrt.scheduler.step_times import StepShape
from tests.scheduler.timed_engine import TimedEngine

STEP_S, ROW_S = 0.020, 0.001


def step_s(rng: random.Random, rows: int) -> float:
    """About that of the 0.4 B shape on two cores, with noise of a twentieth; of fifty steps, one takes 20 times as long."""
    pause = 20 if rng.random() < 0.02 else 1
    return (STEP_S + ROW_S * rows) * rng.uniform(0.95, 1.05) * pause


def expected(batch: int, accepted: int = 0) -> float:
    """Time of a row, in times of a token of a step of which so many draft tokens are accepted."""
    return ROW_S * (batch + accepted) / (STEP_S + ROW_S * (batch + accepted))


@pytest.mark.parametrize("often", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 16, 32])
def test_it_is_the_time_of_a_row_in_times_of_a_token(batch: int, often: float) -> None:
    """Some drafts, always rejected: they make no row cheaper."""
    errors = []
    for seed in range(8):
        rng, price = random.Random(seed), DraftPrice()
        for _ in range(600):
            drafted = rng.randint(1, max(4, batch // 2)) if rng.random() < often else 0
            price.observe(batch, drafted, batch, step_s(rng, batch + drafted))
        errors.append(price.of(batch) / expected(batch))
    assert 0.6 < sorted(errors)[4] < 1.4, errors
    assert min(errors) > 0.3 and max(errors) < 2.0, errors


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_rows_that_cost_as_much_as_tokens_are_never_taken_for_cheap(batch: int) -> None:
    """A step that computes takes twice the time for twice the rows. Half of the drafts are accepted."""
    for seed in range(8):
        rng, price = random.Random(seed), DraftPrice()
        cheap = 0
        for _ in range(300):
            planned = price.of(batch)
            cheap += planned < 0.8
            drafted = rng.randint(1, batch) if planned < 0.8 else 0
            seconds = 0.005 * (batch + drafted) * rng.uniform(0.95, 1.05)
            price.observe(batch, drafted, batch + drafted // 2, seconds)
        assert cheap < 12, "probes alone"


def test_accepted_drafts_make_rows_dearer() -> None:
    """The more tokens a step gives, the less time a token takes, and the more a further row has to give."""
    prices = []
    for accepted in (0, 3, 15):
        price = DraftPrice()
        for step in range(100):
            drafted = 8 + step % 9
            price.observe(1, drafted, 1 + accepted, STEP_S + ROW_S * (1 + drafted))
        prices.append(price.of(1))
    assert prices == sorted(prices) and prices[2] > 5 * prices[0]


def test_it_is_kept_while_nothing_is_drafted() -> None:
    rng, price = random.Random(0), DraftPrice()
    for step in range(200):
        price.observe(16, step % 8, 16, STEP_S + ROW_S * (16 + step % 8))
    before = price.of(16)
    for _ in range(5000):
        price.observe(16, 0, 16, step_s(rng, 16))
    price.of(16)  # perhaps a probe
    assert price.of(16) == pytest.approx(before, rel=0.5) and before > 0.3


def test_another_batch_has_no_part_in_the_slope() -> None:
    """Sequences that come and go change the time of a step more than drafts do."""
    price = DraftPrice()
    for step in range(300):
        batch = 4 + step // 10 % 3 * 8
        drafted = step % 5
        price.observe(batch, drafted, batch, STEP_S + 0.002 * batch + ROW_S * drafted)
    for batch in (4, 12, 20):
        token_s = (STEP_S + 0.002 * batch) / batch
        assert price.of(batch) == pytest.approx(ROW_S / token_s, rel=0.3), batch


def test_many_sequences_after_one_are_not_drafted_until_their_rows_are_measured() -> None:
    """In a batch of one, a row costs next to nothing of a token. It says nothing of sixteen."""
    price = DraftPrice()
    for step in range(100):
        price.observe(1, step % 8, 1, STEP_S + ROW_S * (1 + step % 8))
    assert price.of(1) == pytest.approx(expected(1), rel=0.3)
    assert price.of(16) == 1.0


def test_a_probe_comes_again_after_twice_as_many_steps() -> None:
    price, probes = DraftPrice(), []
    for step in range(200):
        if price.of(8) < 0.9:
            probes.append(step)
            price.observe(8, 4, 8, 0.06)
        else:
            price.observe(8, 0, 8, 0.04)
    between = [later - earlier for earlier, later in pairwise(probes)]
    assert all(later >= 2 * earlier - 1 for earlier, later in pairwise(between)), probes
    assert 4 < len(probes) < 9


def test_steps_without_a_time_are_left_out() -> None:
    price = DraftPrice()
    for step in range(100):
        price.observe(4, step % 5, 4, 0.0)
        price.observe(0, 0, 0, 1.0)
    assert price.of(4) == 1.0


def test_a_first_step_that_takes_long_does_not_make_drafts_look_cheap() -> None:
    """Kernels are loaded in it, and a tape is made."""
    price = DraftPrice()
    price.observe(4, 0, 4, 0.5)
    for step in range(30):
        drafted = 2 * (step % 4 == 3)
        price.observe(4, drafted, 4, 0.005 * (4 + drafted))
    price.of(4)  # perhaps a probe
    assert price.of(4) > 0.9


def test_beside_prompts_it_is_at_least_the_time_of_a_prompt_token() -> None:
    price = DraftPrice()
    assert price.beside_prompts(8, 0.001, outlasting=1.0) == 1.0, "unknown"
    for step in range(50):
        price.observe(8, step % 8, 8, 0.02)
    assert price.of(8) < 0.05
    assert price.beside_prompts(8, 0.001, outlasting=1.0) == pytest.approx(0.4, rel=0.1)
    assert price.beside_prompts(8, 0.001, outlasting=0.0) == 1.0
    assert price.beside_prompts(8, 0.0, outlasting=1.0) == 1.0, "of a prompt token nothing is known"


@pytest.mark.parametrize(("length", "pays"), [(8, False), (400, True)])
def test_beside_prompts_that_fill_each_step_drafts_pay_in_answers_that_outlast_them(
    length: int, pays: bool
) -> None:
    """A short answer ends while the prompts are computed, in as many steps with drafts as without."""

    def step_seconds(shape: StepShape) -> float:
        return STEP_S + ROW_S * (shape.rows + shape.tokens)

    engine = TimedEngine(
        step_seconds, speculates=True, max_step_ms=100, max_prefill_tokens=512, chunked_prefill_size=512
    )  # fmt: skip
    for _ in range(4):
        engine.add(0.0, 40, length)  # so long are answers here
    engine.run()
    for number in range(100):  # the simulated worker drafts nothing
        rows, drafted = 1 + number % 4, number // 4 % 8
        seconds = STEP_S + ROW_S * (rows + drafted)
        engine.scheduler.draft_price.observe(rows, drafted, rows, seconds)
    plans: list[StepPlan] = []
    plan_step = engine.scheduler.plan

    def plan() -> StepPlan | None:
        if (planned := plan_step()) is not None:
            plans.append(planned)
        return planned

    engine.scheduler.plan = plan  # type: ignore[method-assign]
    now = engine.clock.now
    engine.add(now, 40, 300)
    for _ in range(4):
        engine.add(now + 0.5, 1500, 4)
    engine.run()
    beside = [number for number, plan in enumerate(plans) if plan.prefill]
    prices = [plans[number].draft_price for number in beside][10:40]
    assert all(price < 0.5 if pays else price == NO_DRAFTS for price in prices), prices
    after = [plan.draft_price for plan in plans[beside[-1] + 1 :]]
    assert len(after) > 100 and min(after[:8]) < 0.5, "the answer alone"
