"""The learned chance that a page returns, against counting what has become of all pages."""

import random

import pytest

from radixrt.scheduler.disk.index import PageName
from radixrt.scheduler.disk.returns import MIN_CHANCE, Returns

HORIZON = 400


def page(number: int, depth: int) -> PageName:
    return PageName(b"", depth, b"", b"%d" % number)


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.9])
def test_the_chance_is_the_share_that_returns_before_the_disk_is_full(chance: float) -> None:
    """Half of those that return come soon, half late; of another depth, none does."""
    rng, returns = random.Random(7), Returns(HORIZON)
    due: dict[int, list[PageName]] = {}
    for number in range(4000):
        one, other = page(number, 5), page(-number - 1, 100)
        returns.left(one, False)
        returns.left(other, False)
        if rng.random() < chance:
            due.setdefault(number + rng.choice([3, HORIZON // 2 - 20]), []).append(one)
        for late in due.pop(number, ()):
            returns.needed([late], ())
    assert returns.chance(one, False) == pytest.approx(chance, abs=0.08)
    assert returns.chance(other, False) < 0.05


def test_pages_that_have_had_no_time_to_return_are_not_taken_for_lost() -> None:
    returns = Returns(10_000)
    for number in range(1000):
        returns.left(page(number, 5), False)
        if number >= 600:
            returns.needed([page(number - 600, 5)], ())
    assert returns.chance(page(0, 5), False) > 0.3


def test_answers_are_told_from_prompts() -> None:
    returns = Returns(HORIZON)
    for number in range(3000):
        returns.left(page(number, 5), number % 2 == 1)
        if number >= 100 and number % 2 == 0:
            returns.needed([page(number - 100, 5)], ())
    assert returns.chance(page(0, 5), True) < MIN_CHANCE < 0.8 < returns.chance(page(0, 5), False)


def test_pages_behind_one_that_is_on_disk_are_needed_too() -> None:
    returns = Returns(HORIZON)
    before = returns.chance(page(1, 1), False)
    returns.left(page(1, 1), False)
    returns.needed([page(0, 0), page(1, 1)], {b"0"})
    assert returns.chance(page(1, 1), False) > before
    returns.left(page(2, 1), False)
    after = returns.chance(page(2, 1), False)
    returns.needed([page(7, 0), page(2, 1)], {b"0"})
    assert returns.chance(page(2, 1), False) == after, "its prefix is nowhere"
