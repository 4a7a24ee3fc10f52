"""Drafts are switched off where they cost more than they save, and are tried again."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from radixrt.scheduler.drafts.trials import (
    MAX_REST,
    STEPS_OFF,
    STEPS_ON,
    ComparedStep,
    DraftTrials,
)


@dataclass
class Batch:
    """Sequences that decode on a machine with noise; of fifty steps, one takes twenty times as long."""

    rows: int
    cost: float
    """Of a step with drafts, in times of one without."""
    tokens: float
    """That a sequence gets in a step with drafts."""
    trials: DraftTrials = field(default_factory=DraftTrials)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    prompts: Callable[[int], float] = lambda number: 0.0
    """Time of the prompts of each step, in times of a step without drafts. The forecast errs by up to a fifth of it."""

    def run(self, tokens: int) -> tuple[float, int]:
        """Seconds for so many tokens of each sequence, in times of the seconds without drafts; and steps with drafts. The time of
        prompts does not count."""
        seconds, got, with_drafts, in_flight, number = 0.0, 0.0, 0, [], 0
        while got < tokens:
            in_flight.append((self.trials.wants_drafts(self.rows), self.prompts(number)))
            number += 1
            if len(in_flight) < 2:
                continue
            drafts, prompts = in_flight.pop(0)
            pause = 20 if self.rng.random() < 0.02 else 1
            taken = (self.cost if drafts else 1.0) * self.rng.uniform(0.95, 1.05)
            new = self.tokens if drafts else 1.0
            step = ComparedStep(
                self.rows,
                new_tokens=round(new * self.rows),
                answers_s=0.9,
                plain_s=0.9 * (1 + prompts),
                forecast_s=0.9 * (self.cost + prompts),
                drafts=drafts,
            )
            self.trials.observe(step, (taken + prompts * self.rng.uniform(0.8, 1.2)) * pause)
            seconds, got, with_drafts = seconds + taken, got + new, with_drafts + drafts
        return seconds / got, with_drafts


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize(("cost", "tokens"), [(1.03, 1.0), (1.15, 1.0), (1.5, 1.25)])
def test_drafts_that_do_not_pay_are_switched_off(rows: int, cost: float, tokens: float) -> None:
    batch = Batch(rows, cost, tokens)
    batch.run(3 * STEPS_ON)
    seconds, with_drafts = batch.run(5000)
    assert with_drafts < 1000 and seconds < 1.02


@pytest.mark.parametrize(("cost", "tokens"), [(1.3, 2.0), (1.5, 6.0)])
def test_drafts_that_pay_are_hardly_interrupted(cost: float, tokens: float) -> None:
    seconds, _ = Batch(8, cost, tokens).run(5000)
    assert seconds < 1.03 * cost / tokens


def test_drafts_come_back_when_they_pay_again_and_at_once_for_a_known_answer() -> None:
    for known in (False, True):
        batch = Batch(8, cost=1.2, tokens=1.0)
        batch.run(2000)
        batch.cost, batch.tokens = 1.2, 2.0
        if known:
            batch.trials.encourage()
            assert batch.run(2 * STEPS_ON)[1] >= STEPS_ON
        batch.run(MAX_REST)
        seconds, _ = batch.run(2000)
        assert seconds < 0.65


def bursts(number: int) -> float:
    """Long prompts whenever steps without drafts are due, if all steps are counted."""
    return 3.0 * (not 4 <= number % (STEPS_ON + STEPS_OFF) < STEPS_ON - 4)


def steady(number: int) -> float:
    """A short prompt in each step."""
    return 0.3 + 0.1 * (number % 6)


@pytest.mark.parametrize("prompts", [bursts, steady])
def test_prompts_that_keep_coming_do_not_spoil_the_comparison(
    prompts: Callable[[int], float],
) -> None:
    for rows in (1, 8, 16):
        batch = Batch(rows, cost=1.5, tokens=1.25, prompts=prompts)
        batch.run(6 * STEPS_ON)
        seconds, with_drafts = batch.run(5000)
        assert with_drafts < 1000 and seconds < 1.03
        seconds, _ = Batch(rows, cost=1.3, tokens=2.0, prompts=prompts).run(5000)
        assert seconds < 1.03 * 1.3 / 2.0


def test_steps_that_prompts_fill_are_not_counted() -> None:
    trials = DraftTrials()
    step = ComparedStep(4, 4, answers_s=0.01, plain_s=0.03, forecast_s=0.03, drafts=True)
    for _ in range(10 * STEPS_ON):
        trials.observe(step, 0.03)
    assert trials.wants_drafts(4)


def test_batches_of_another_magnitude_are_compared_for_themselves() -> None:
    trials = DraftTrials()
    one, many = Batch(1, cost=1.1, tokens=2.0, trials=trials), Batch(16, 1.3, 1.1, trials)
    for _ in range(10):
        alone, together = one.run(400), many.run(400)
    assert alone[0] < 0.57 and together[0] < 1.02


def test_steps_without_a_time_are_left_out() -> None:
    trials = DraftTrials()
    step = ComparedStep(4, 4, answers_s=0.01, plain_s=0.01, forecast_s=0.01, drafts=True)
    for _ in range(200):
        trials.observe(step, 0.0)
        trials.observe(step._replace(answers_s=0.0, plain_s=0.0), 1.0)
    assert trials.wants_drafts(4)
    for _ in range(STEPS_ON):
        trials.observe(step, 0.01)
    assert not trials.wants_drafts(4)
