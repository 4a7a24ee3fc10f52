"""The price of a draft row is learned from step times, in a batch that hardly changes and in spite
of noise."""

import random
from itertools import pairwise

import pytest

from radixrt.worker.drafts.price import NEVER, DraftPrice

STEP_S, ROW_S = 0.020, 0.001


def step_s(rng: random.Random, rows: int) -> float:
    """About that of the 0.4 B shape on two cores, with noise of a twentieth; of fifty steps, one
    takes 20 times as long."""
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
        errors.append(price.next(batch) / expected(batch))
    assert 0.6 < sorted(errors)[4] < 1.4, errors
    assert min(errors) > 0.3 and max(errors) < 2.0, errors


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_rows_that_cost_as_much_as_tokens_are_never_taken_for_cheap(batch: int) -> None:
    """A step that computes takes twice the time for twice the rows. Half of the drafts are
    accepted."""
    for seed in range(8):
        rng, price = random.Random(seed), DraftPrice()
        cheap = 0
        for _ in range(300):
            planned = price.next(batch)
            cheap += planned < 0.8
            drafted = rng.randint(1, batch) if planned < 0.8 else 0
            seconds = 0.005 * (batch + drafted) * rng.uniform(0.95, 1.05)
            price.observe(batch, drafted, batch + drafted // 2, seconds)
        assert cheap < 12, "probes alone"


def test_accepted_drafts_make_rows_dearer() -> None:
    """The more tokens a step gives, the less time a token takes, and the more a further row has to
    give."""
    prices = []
    for accepted in (0, 3, 15):
        price = DraftPrice()
        for step in range(100):
            drafted = 8 + step % 9
            price.observe(1, drafted, 1 + accepted, STEP_S + ROW_S * (1 + drafted))
        prices.append(price.next(1))
    assert prices == sorted(prices) and prices[2] > 5 * prices[0]


def test_it_is_kept_while_nothing_is_drafted() -> None:
    rng, price = random.Random(0), DraftPrice()
    for step in range(200):
        price.observe(16, step % 8, 16, STEP_S + ROW_S * (16 + step % 8))
    before = price.next(16)
    for _ in range(5000):
        price.observe(16, 0, 16, step_s(rng, 16))
    price.next(16)  # perhaps a probe
    assert price.next(16) == pytest.approx(before, rel=0.5) and before > 0.3


def test_another_batch_has_no_part_in_the_slope() -> None:
    """Sequences that come and go change the time of a step more than drafts do."""
    price = DraftPrice()
    for step in range(300):
        batch = 4 + step // 10 % 3 * 8
        drafted = step % 5
        price.observe(batch, drafted, batch, STEP_S + 0.002 * batch + ROW_S * drafted)
    for batch in (4, 12, 20):
        token_s = (STEP_S + 0.002 * batch) / batch
        assert price.next(batch) == pytest.approx(ROW_S / token_s, rel=0.3), batch


def test_many_sequences_after_one_are_not_drafted_until_their_rows_are_measured() -> None:
    """In a batch of one, a row costs next to nothing of a token. It says nothing of sixteen."""
    price = DraftPrice()
    for step in range(100):
        price.observe(1, step % 8, 1, STEP_S + ROW_S * (1 + step % 8))
    assert price.next(1) == pytest.approx(expected(1), rel=0.3)
    assert price.next(16) == 1.0


def test_a_probe_comes_again_after_twice_as_many_steps() -> None:
    price, probes = DraftPrice(), []
    for step in range(200):
        if price.next(8) < 0.9:
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
    assert price.next(4) == 1.0


def test_a_first_step_that_takes_long_does_not_make_drafts_look_cheap() -> None:
    """Kernels are loaded in it, and a tape is made."""
    price = DraftPrice()
    price.observe(4, 0, 4, 0.5)
    for step in range(30):
        drafted = 2 * (step % 4 == 3)
        price.observe(4, drafted, 4, 0.005 * (4 + drafted))
    price.next(4)  # perhaps a probe
    assert price.next(4) > 0.9


def test_drafting_that_takes_more_than_it_saves_is_stopped_until_a_probe_saves() -> None:
    """The rows cost next to nothing, but each search takes a tenth of a step."""
    price, sought, step_s = DraftPrice(), [], 0.002

    def run(steps: int, accepted: int) -> int:
        """Steps of which each drafts a token for each of 16 sequences, where that is tried."""
        before = len(sought)
        for _ in range(steps):
            if price.next(16) < NEVER:
                sought.append(1)
                seconds = 1.1 * step_s + 0.000_001 * 16
                price.observe(16, 16, 16 + accepted, seconds, draft_s=0.1 * step_s)
            else:
                price.observe(16, 0, 16, step_s)
        return len(sought) - before

    run(100, accepted=0)
    assert run(500, accepted=0) < 15, "probes alone"
    run(1500, accepted=8)
    assert run(200, accepted=8) == 200
    run(500, accepted=0)
    assert run(100, accepted=0) < 5
    price.retry_soon()
    assert run(200, accepted=8) == 200


def test_a_search_that_takes_little_goes_on_though_it_finds_nothing() -> None:
    price = DraftPrice()
    for step in range(200):
        price.observe(1, step % 8, 1 + step % 4, STEP_S + ROW_S * (1 + step % 8), draft_s=1e-5)
    for _ in range(2000):
        assert price.next(1) < NEVER
        price.observe(1, 0, 1, STEP_S + ROW_S, draft_s=1e-5)


def test_beside_prompts_it_is_at_least_the_time_of_a_prompt_token() -> None:
    price = DraftPrice()
    assert price.beside_prompts(8, saving=1.0) == NEVER, "unknown"
    for step in range(50):
        price.observe(8, step % 8, 8, 0.02)
    assert price.next(8) < 0.05
    assert price.beside_prompts(8, saving=1.0) == NEVER, "of a prompt token nothing is known"
    price.observe_prompts(8, drafted=3, tokens=100, seconds=0.12)
    assert price.beside_prompts(8, saving=1.0) == pytest.approx(0.4, rel=0.1)
    assert price.beside_prompts(8, saving=0.0) == NEVER


def test_prompt_tokens_are_timed_without_the_answers_beside_them() -> None:
    rng, price = random.Random(0), DraftPrice()
    for step in range(200):
        rows, drafted = 1 + step % 4, step % 3
        price.observe(rows, drafted, rows, STEP_S + ROW_S * (rows + drafted))
        tokens = rng.randrange(50, 200)
        price.observe_prompts(rows, drafted, tokens, STEP_S + ROW_S * (rows + drafted + tokens))
    for rows in range(1, 5):
        token_s = (STEP_S + ROW_S * rows) / rows
        expected_price = ROW_S / token_s
        assert price.beside_prompts(rows, 1.0) == pytest.approx(expected_price, rel=0.3)
