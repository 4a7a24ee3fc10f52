"""Learns the price of a draft row, the time that it adds to a step in times of an output token, and
the chance of a draft token to be accepted. A draft token is worth its row while the chance exceeds
the price.

A head takes time for each token that it drafts, before there is a row. That time is measured apart
(:meth:`DraftPrice.of_head`), and is no part of the time of a row.

The time of a row is the slope of step times over the number of draft rows, from steps without
prompts. A step is compared with the last ones of as many sequences, so neither sequences that come
and go nor their growing context have a part in it. Each magnitude of the batch has a slope of its
own: one row more may cost nothing while a step waits for weights, and as much as a token where it
computes.

Until rows have been measured, a row is taken to cost as much as a token, and nothing is drafted. So
now and then a step is computed at a low price, the next one after twice as many steps each time: a
*probe*. The assumption counts as much as a few draft rows, so it fades as rows are measured (ridge
regression towards the line through the origin).

To draft takes time too, whether rows come of it or not. So the tokens that drafting saves beyond
its rows are counted against its own time. While it makes answers slower by more than MAX_LOSS,
there are only probes.

A draft token survives if it and all before it are accepted. The first shows whether the source is
the right one, so the tokens behind it have a chance of their own: with the chances p and q, the
i-th survives with p times q to the power of i - 1. The chances depend on the tokens alone, so all
ranks draft alike. The sequences share them: to learn them for each sequence too has gained less
than 3 % in every workload of ``bench.speculation``, and lost as much in most.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 0.97
"""Weight of a draft for each draft after it."""

FIRST_CHANCE = 0.5
"""Chance of a token of a drafter that guesses, before anything is learned."""
EXPECTED_CHANCE = 0.85
"""The same for a drafter whose text the answer is expected to follow."""
_FIRST_WEIGHT = 2.0
"""Drafts for which the first chance counts."""

MAX_CHANCE = 0.995

Source = tuple[int, int]
"""A drafter, and the kind of its evidence."""


class Chance(NamedTuple):
    """That draft tokens are accepted, given that those before them are."""

    first: float
    later: float

    def paying_length(self, price: float, most: int) -> int:
        """Number of draft tokens whose chance to survive exceeds the price.

        >>> Chance(0.5, 0.5).paying_length(0.2, 8), Chance(0.5, 0.9).paying_length(0.2, 31)
        (2, 9)
        >>> Chance(0.2, 0.9).paying_length(0.2, 8)
        0
        """
        if self.first <= price:
            return 0
        if price <= 0:
            return most
        return min(most, math.ceil(math.log(price / self.first) / math.log(self.later)))

    def expected_accepted(self, num_drafted: int) -> float:
        """Mean number of draft tokens that are accepted.

        >>> Chance(0.5, 0.5).expected_accepted(2)
        0.75
        """
        return self.first * (1 - self.later**num_drafted) / (1 - self.later)

    def survival(self, num_drafted: int) -> float:
        """Chance that all are accepted, of at least one."""
        return self.first * self.later ** (num_drafted - 1)


class Chances:
    """The chances of all drafters.

    Args:
        expected: drafters whose texts the answers are expected to follow.
    """

    def __init__(self, expected: Collection[int] = ()) -> None:
        self._expected = expected
        self._rates: dict[Source, tuple[Rate, Rate]] = {}
        """Rates of the first tokens of drafts, and of the others."""

    def estimate(self, source: Source) -> Chance:
        """The chances of tokens of a source to be accepted."""
        expected = EXPECTED_CHANCE if source[0] in self._expected else FIRST_CHANCE
        first, later = self._rates.get(source, _UNTRIED)
        return Chance(
            min(first.value(expected, _FIRST_WEIGHT), MAX_CHANCE),
            min(later.value(expected, _FIRST_WEIGHT), MAX_CHANCE),
        )

    def learn(self, source: Source, num_tried: int, num_right: int) -> None:
        """Note how many of the first tokens of a draft the answer has. The tokens behind the first
        wrong one say nothing."""
        first, later = self._rates.setdefault(source, (Rate(KEPT), Rate(KEPT)))
        first.observe(min(num_right, 1), 1)
        if num_right:  # what is not tried is forgotten, and so tried again
            later.observe(num_right - 1, min(num_right, num_tried - 1))


class Rate:
    """A ratio of two sums over the last observations.

    Args:
        kept: weight of an observation for each one after it.
    """

    __slots__ = ("_count", "_kept", "_part")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._part = self._count = 0.0

    def observe(self, part: float, count: float) -> None:
        self._part = self._kept * self._part + part
        self._count = self._kept * self._count + count

    def value(self, expected: float, weight: float = 1e-9) -> float:
        """The ratio, as if ``weight`` counts of an expected ratio had been observed before."""
        return (self._part + weight * expected) / (self._count + weight)


_UNTRIED = Rate(KEPT), Rate(KEPT)


NEVER = 1.0
"""A row that costs as much as a token: no draft is worth it."""

PROBE_PRICE = 0.4
"""Drafters that nothing is known about draft one token at this price."""

FIRST_PROBE, MAX_PROBE_INTERVAL = 2, 128
"""Steps of a magnitude of the batch from one probe to the next."""

MIN_PRICE, MAX_PRICE = 0.02, 0.8
"""Bounds of the price. Above the second, even a token that is accepted saves too little."""

MAX_LOSS = 0.02
"""Tokens for each sequence and step by which drafting may make answers slower. A search that finds
little takes less of most steps, and finds the next copy in time."""

_KEPT = 0.98
"""Weight of a step with drafts for each one after it."""

_KEPT_OF_TOKENS = 0.95
"""Weight of a step for each one after it, in what its tokens cost and save."""

_NEWEST = 0.1
"""Weight of a step in the means."""

_PRIOR = 0.03
"""Weight of the assumption that all rows cost the same, in steps that differ by as many rows as
there are sequences."""

_EVEN_STEPS = 16.0
"""Steps of drafting that neither save nor lose, before any is counted."""

_LONGEST = 4.0
"""Times of a plain step: a longer step counts as this in the time of a token."""

_MAX_NOISE = 0.3
"""Part of the mean time of a step: a larger difference to the forecast counts as this. The machine
pauses now and then."""


@dataclass(slots=True)
class _Mean:
    """The last steps of some number of sequences. The first one does not count: kernels are loaded,
    and a tape is made, in it."""

    drafted: float
    seconds: float
    steps: int = 1

    @property
    def is_known(self) -> bool:
        return self.steps > 2

    def observe(self, more_drafted: float, more_s: float) -> None:
        """Note a step that differs by so much."""
        part = max(_NEWEST, 1 / self.steps)
        self.steps += 1
        self.drafted += part * more_drafted
        self.seconds += part * min(more_s, self.seconds)


@dataclass(slots=True)
class _Magnitude:
    """The time of a row, for batches of one magnitude. Rows are counted in times of the sequences,
    and seconds in times of a plain step."""

    variance: float = 0.0
    """Weighted sum of the squared differences in draft rows."""
    covariance: float = 0.0
    """Weighted sum of these differences times those in seconds."""
    plain_ratio: Rate = field(default_factory=lambda: Rate(_KEPT_OF_TOKENS))
    """Seconds in times of those in which plain steps give as many tokens."""
    saved: Rate = field(default_factory=lambda: Rate(_KEPT_OF_TOKENS))
    """Tokens for each sequence that a step with drafting saves."""
    to_probe: int = FIRST_PROBE
    """Steps until the next probe."""
    interval: int = FIRST_PROBE
    probes: bool = False
    """A probe has begun, and no step with drafts has been seen since."""

    @property
    def row(self) -> float:
        """Time that a draft row adds, in times of a token of a plain step."""
        return max(0.0, (self.covariance + _PRIOR) / (self.variance + _PRIOR))

    @property
    def price(self) -> float:
        """The price of a row. Where drafts are accepted, tokens take less time, so a row costs more
        of them."""
        return max(self.row / min(1.0, self.plain_ratio.value(1.0)), MIN_PRICE)

    @property
    def pays(self) -> bool:
        """Some draft may save more than it costs."""
        return self.price <= MAX_PRICE and self.saved.value(0.0, _EVEN_STEPS) > -MAX_LOSS

    def observe(self, more_rows: float, more_seconds: float) -> None:
        """Note a step that differs by so much from the mean."""
        forecast = self.row * more_rows
        least, most = min(0.0, forecast) - _MAX_NOISE, max(0.0, forecast) + _MAX_NOISE
        more_seconds = min(max(more_seconds, least), most)
        self.variance = _KEPT * self.variance + more_rows * more_rows
        self.covariance = _KEPT * self.covariance + more_rows * more_seconds


FIRST_HEAD_COST = 0.05
"""Cost of a token that a head drafts, in times of an output token, before it is measured."""


class DraftPrice:
    """The price, learned from the times of steps."""

    def __init__(self) -> None:
        self._head_token_s = Rate(_KEPT)
        self._means: dict[int, _Mean] = {}
        """The last steps, by the number of sequences."""
        self._magnitudes: dict[int, _Magnitude] = {}
        self._prompt_token_s = Rate(_KEPT)

    # ------------------------------------------------------------ learning

    def observe(
        self,
        rows: int,
        drafted: int,
        new_tokens: int,
        seconds: float,
        draft_s: float = 0.0,
        head_s: float = 0.0,
    ) -> None:
        """Learn from a step without prompts.

        Args:
            seconds: the time of the step; 0 stands for an unknown one.
            draft_s: the part of it that drafting took; 0: nothing was drafted or looked for.
            head_s: the part of that which the head took.
        """
        if not rows:
            return
        learned = self._magnitude(rows)
        learned.to_probe -= 1
        if drafted:
            if learned.probes:
                learned.interval = min(2 * learned.interval, MAX_PROBE_INTERVAL)
            learned.probes, learned.to_probe = False, learned.interval
        if seconds <= 0:
            return
        whole_s, seconds = seconds, seconds - head_s
        if rows not in self._means:
            self._means[rows] = _Mean(drafted, seconds)
            return
        mean = self._means[rows]
        plain_s = mean.seconds / (1 + learned.row * mean.drafted / rows)
        if draft_s and learned.price <= MAX_PRICE:
            saved = max(0.0, new_tokens - rows - learned.row * drafted)  # chances learn of others
            learned.saved.observe(saved / rows - min(draft_s / plain_s, _MAX_NOISE), 1)
        more_drafted, more_s = drafted - mean.drafted, seconds - mean.seconds
        if mean.is_known and abs(more_drafted) >= 0.5:
            learned.observe(more_drafted / rows, more_s / plain_s)
        mean.observe(more_drafted, more_s)
        learned.plain_ratio.observe(min(whole_s / plain_s, _LONGEST), new_tokens / rows)

    def observe_head(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step what a token takes that a head drafts."""
        if num_tokens:
            self._head_token_s.observe(seconds, num_tokens)

    def observe_prompts(self, rows: int, drafted: int, tokens: int, seconds: float) -> None:
        """Learn from a step with this number of prompt tokens what one of them takes at most."""
        answers_s = self._plain_s(rows)
        if rows and answers_s:
            answers_s *= 1 + self._magnitude(rows).row * drafted / rows
        self._prompt_token_s.observe(max(0.0, seconds - answers_s), tokens)

    def retry_soon(self) -> None:
        """A sequence has come whose answer is perhaps known: forget what drafting has lost."""
        for learned in self._magnitudes.values():
            learned.saved = Rate(_KEPT_OF_TOKENS)

    # ------------------------------------------------------------ prices

    def of_head(self, rows: int) -> float:
        """What a token costs that a head drafts in a step with these decoding sequences, beside its
        row: in times of an output token."""
        plain_s, head_token_s = self._plain_s(rows), self._head_token_s.value(0.0)
        if not plain_s or not head_token_s:
            return FIRST_HEAD_COST
        ratio = self._magnitude(rows).plain_ratio.value(1.0)
        return head_token_s * rows / plain_s / min(1.0, ratio)

    def next(self, rows: int) -> float:
        """The price in the next step, which has these decoding sequences and no prompts: a draft
        token pays if it is accepted more often."""
        learned = self._magnitude(rows)
        price = learned.price
        if learned.to_probe <= 0 and rows in self._means and self._means[rows].is_known:
            learned.probes, learned.to_probe = True, 1  # again if nothing is drafted now
            return min(price, PROBE_PRICE)
        return price if learned.pays else NEVER

    def beside_prompts(self, rows: int, saving: float) -> float:
        """The price in a step that prompts fill. A row computes there, so it takes at least as long
        as a prompt token.

        While more prompts are to come, there are as many such steps as these need, whatever the
        answers get in them. So an accepted token saves the time of its own row in a later step, and
        no step. Tokens that come when the prompts are computed save both.
        """
        plain_s, prompt_token_s = self._plain_s(rows), self._prompt_token_s.value(0.0)
        learned = self._magnitude(rows)
        if not plain_s or not prompt_token_s or not learned.pays:
            return NEVER
        price = max(learned.price, prompt_token_s * rows / plain_s)
        price = 1 / (saving / price + 1 - saving)
        return price if price <= MAX_PRICE else NEVER

    def _plain_s(self, rows: int) -> float:
        """Time of a step without drafts, at least; 0: unknown."""
        known = min(self._means, key=lambda other: abs(other - rows), default=0)
        if not known:
            return 0.0
        mean = self._means[known]
        plain_s = mean.seconds / (1 + self._magnitude(known).row * mean.drafted / known)
        return plain_s * min(1.0, rows / known)

    def _magnitude(self, rows: int) -> _Magnitude:
        return self._magnitudes.setdefault(rows.bit_length(), _Magnitude())


FIRST_TRIAL, MAX_TRIAL_INTERVAL = 16, 256
"""Steps without a draft of the head, although others draft, from one trial of it to the next."""


class HeadTrials:
    """Lets a head draft now and then that has been wrong: it may be right for other answers."""

    def __init__(self) -> None:
        self._interval = self._left = FIRST_TRIAL

    def is_due(self, *, drafts: bool) -> bool:
        """Whether the head is to draft a token in this step all the same.

        Args:
            drafts: it drafts anyway.
        """
        if drafts:
            self._interval = self._left = FIRST_TRIAL
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self._interval = min(2 * self._interval, MAX_TRIAL_INTERVAL)
        self._left = self._interval
        return True
