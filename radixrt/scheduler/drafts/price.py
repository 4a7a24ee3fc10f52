"""Learns the price of a draft token: the time that its row adds to a step, in times of an output token.

Least squares over all features of a step (:mod:`radixrt.scheduler.step_times`) forget what a row costs while the batch stays the same, and with sixteen sequences the noise of
a step is larger than a row. So the time of a row is the slope of step times over the number of draft rows, from steps
without prompts. A step is compared with the last ones of as many sequences, and only steps that differ in their drafts make it forget.

The time of a token depends on the number of sequences far more than that of a row. So it is the forecast for the sequences at hand,
times the part of such forecasts that the last steps took for each of their tokens: where drafts are accepted, tokens take less time.

Steps that prompts fill have a price of their own (:func:`beside_prompts`).
"""

from radixrt.scheduler.step_times import RecentRatio

FIRST_PRICE = 0.2
"""Before times are known."""

LEAST_PRICE, MOST_PRICE = 0.02, 0.99

STEPS_KNOWN = 8
"""Steps with another number of drafts than the ones before, until the slope counts."""

_KEPT = 0.98
"""Weight of a step with drafts for each one after it."""

_NEWEST = 0.1
"""Weight of a step in the means."""

_LONGEST = 4.0
"""Times of its forecast without drafts: a longer step counts as this."""

_MOST_NOISE = 0.3
"""Of the mean time of a step: a larger difference to the forecast counts as this. The machine pauses now and then."""


def beside_prompts(price: float, outlasting: float) -> float:
    """The price of a draft row in a step that prompts fill, while more of them are to come.

    There are as many such steps as the prompts need, whatever the answers get in them. So an accepted token saves the time of
    its own row in a later step, and no step. Tokens that come when the prompts are computed save both.

    >>> beside_prompts(0.25, outlasting=1.0), beside_prompts(0.25, outlasting=0.0)
    (0.25, 1.0)
    >>> beside_prompts(0.25, outlasting=0.5)
    0.4

    Args:
        price: of a draft row, without prompts to come.
        outlasting: of the tokens that the answers will still get, the part that comes when the prompts are computed.
    """
    return 1 / (outlasting / price + 1 - outlasting)


class DraftPrice:
    """The price, from the times of steps."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        """By the number of sequences: drafts and seconds of the last steps."""
        self._variance = self._covariance = 0.0
        """Weighted sums, of the number of drafts, and of this and the seconds."""
        self._differing = 0
        self._of_forecast = RecentRatio()
        """Time of a token, in times of the forecast for one without drafts."""
        self._token_s = RecentRatio()
        """For steps without a forecast: they are not learned from while all have drafts."""

    def observe(
        self, rows: int, drafted: int, new_tokens: int, seconds: float, plain_s: float
    ) -> None:
        """Learn from a step without prompts.

        Args:
            rows: decoding sequences.
            drafted: draft tokens that were verified.
            new_tokens: of answers.
            seconds: 0 stands for an unknown time.
            plain_s: the forecast for a step without drafts; 0: unknown.
        """
        if seconds <= 0 or not rows:
            return
        self._token_s.observe(seconds, new_tokens)
        self._of_forecast.observe(min(seconds, _LONGEST * plain_s), plain_s * new_tokens / rows)
        mean_drafted, mean_s = self._means.setdefault(rows, (drafted, seconds))
        more_drafted = drafted - mean_drafted
        more_s = self._without_pause(more_drafted, seconds - mean_s, mean_s)
        if abs(more_drafted) >= 0.5:
            self._differing += 1
            self._variance = _KEPT * self._variance + more_drafted * more_drafted
            self._covariance = _KEPT * self._covariance + more_drafted * more_s
        self._means[rows] = mean_drafted + _NEWEST * more_drafted, mean_s + _NEWEST * more_s

    def _without_pause(self, more_drafted: float, more_s: float, mean_s: float) -> float:
        """Seconds that a step takes longer than the mean."""
        forecast_s = self._row_s * more_drafted
        most_s = _MOST_NOISE * mean_s
        return forecast_s + min(max(more_s - forecast_s, -most_s), most_s)

    @property
    def _row_s(self) -> float:
        """Seconds that a draft row adds to a step."""
        return self._covariance / self._variance if self._variance else 0.0

    @property
    def is_known(self) -> bool:
        return self._differing >= STEPS_KNOWN

    def of(self, token_s: float) -> float:
        """A draft token pays if it is accepted more often than this.

        Args:
            token_s: the forecast time of a token of the sequences at hand, without drafts; 0: unknown.
        """
        token_s = token_s * (self._of_forecast.value or 1.0) or self._token_s.value
        if not self.is_known or not token_s:
            return FIRST_PRICE
        return round(min(max(self._row_s / token_s, LEAST_PRICE), MOST_PRICE), 3)
