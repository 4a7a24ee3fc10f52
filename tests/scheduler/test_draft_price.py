"""The price of a draft row is learned from step times, in a batch that hardly changes and in spite of noise."""

import random

import pytest

from radixrt.messages.steps import NO_DRAFTS, StepPlan
from radixrt.scheduler.drafts.price import FIRST_PRICE, DraftPrice
from radixrt.scheduler.step_times import StepShape
from tests.scheduler.timed_engine import TimedEngine

STEP_S, ROW_S = 0.020, 0.001


def step_s(rng: random.Random, rows: int) -> float:
    """About that of the 0.4 B shape on two cores, with noise of a twentieth; of fifty steps, one takes 20 times as long."""
    pause = 20 if rng.random() < 0.02 else 1
    return (STEP_S + ROW_S * rows) * rng.uniform(0.95, 1.05) * pause


def plain_s(batch: int) -> float:
    """Of a step without drafts."""
    return STEP_S + ROW_S * batch


def expected(batch: int, tokens: float) -> float:
    """Time of a row, in times of a token."""
    return ROW_S / ((STEP_S + ROW_S * batch) / tokens)


@pytest.mark.parametrize("often", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("batch", [1, 16, 32])
def test_it_is_the_time_of_a_row_in_times_of_a_token(batch: int, often: float) -> None:
    """Some drafts, always rejected."""
    errors = []
    for seed in range(8):
        rng, price = random.Random(seed), DraftPrice()
        assert price.of(plain_s(batch) / batch) == FIRST_PRICE
        rows = 0
        for _ in range(600):
            drafted = rng.randint(1, 7) if rng.random() < often else 0
            rows += drafted
            price.observe(batch, drafted, batch, step_s(rng, batch + drafted), plain_s(batch))
        mean = batch + rows / 600
        errors.append(price.of(plain_s(batch) / batch) / expected(round(mean), batch))
    assert 0.75 < sorted(errors)[4] < 1.33, errors
    assert min(errors) > 0.4 and max(errors) < 2.0, errors


def test_accepted_drafts_make_rows_dearer() -> None:
    """The more tokens a step gives, the less time a token takes, and the more a further row has to give."""
    prices = []
    for accepted in (0, 3, 15):
        price = DraftPrice()
        for step in range(100):
            drafted = 8 + step % 9
            seconds = STEP_S + ROW_S * (1 + drafted)
            price.observe(1, drafted, 1 + accepted, seconds, plain_s(1))
        prices.append(price.of(plain_s(1)))
    assert prices == sorted(prices) and prices[2] > 10 * prices[0]


def test_it_is_kept_while_nothing_is_drafted() -> None:
    rng, price = random.Random(0), DraftPrice()
    for step in range(200):
        price.observe(16, step % 8, 16, STEP_S + ROW_S * (16 + step % 8), plain_s(16))
    before = price.of(plain_s(16) / 16)
    for _ in range(5000):
        price.observe(16, 0, 16, step_s(rng, 16), plain_s(16))
    assert price.of(plain_s(16) / 16) == pytest.approx(before, rel=0.5) and before > 0.3


def test_another_batch_has_no_part_in_the_slope() -> None:
    """Sequences that come and go change the time of a step more than drafts do."""
    price = DraftPrice()
    for step in range(300):
        batch = 4 + step // 10 % 3 * 8
        drafted = step % 5
        plain = STEP_S + 0.002 * batch
        price.observe(batch, drafted, batch, plain + ROW_S * drafted, plain)
    for batch in (1, 4, 12, 20):
        token_s = (STEP_S + 0.002 * batch) / batch
        assert price.of(token_s) == pytest.approx(ROW_S / token_s, rel=0.3), batch


def test_many_sequences_after_one_have_a_price_of_their_own() -> None:
    """In a batch of one, a token takes a whole step, and a draft row next to nothing of it."""
    price = DraftPrice()
    for step in range(100):
        price.observe(1, step % 8, 1, plain_s(1 + step % 8), plain_s(1))
    assert price.of(plain_s(1)) == pytest.approx(ROW_S / plain_s(1), rel=0.2)
    assert price.of(plain_s(16) / 16) == pytest.approx(expected(16, 16), rel=0.2)


def test_without_forecasts_it_is_that_of_the_last_steps() -> None:
    """Where all steps have drafts, no other times are learned."""
    price = DraftPrice()
    for step in range(100):
        price.observe(1, 1 + step % 8, 1, plain_s(2 + step % 8), 0.0)
    assert price.of(0.0) == pytest.approx(ROW_S / plain_s(5), rel=0.2)


def test_steps_without_a_time_are_left_out() -> None:
    price = DraftPrice()
    for step in range(100):
        price.observe(4, step % 5, 4, 0.0, plain_s(4))
        price.observe(0, 0, 0, 1.0, 0.0)
    assert price.of(plain_s(4) / 4) == FIRST_PRICE


def test_it_is_learned_while_the_number_of_sequences_changes_in_each_step() -> None:
    """Short answers come and go."""
    rng, price = random.Random(0), DraftPrice()
    for step in range(400):
        batch, drafted = 2 + step % 7, rng.randint(0, 40)
        seconds = (STEP_S + ROW_S * (2 * batch + drafted)) * rng.uniform(0.95, 1.05)
        price.observe(batch, drafted, batch, seconds, STEP_S + ROW_S * 2 * batch)
    mean_s = STEP_S + ROW_S * (2 * 5 + 20)
    plain_token_s = (STEP_S + ROW_S * 2 * 5) / 5
    assert price.of(plain_token_s) == pytest.approx(ROW_S / (mean_s / 5), rel=0.2)


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
