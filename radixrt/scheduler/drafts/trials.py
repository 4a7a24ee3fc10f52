"""Compares steps with and without drafts, and switches drafts off while they cost more than they save.

The price of a draft row (:mod:`radixrt.scheduler.drafts.price`) decides on the length of drafts. It does not know what drafting costs by itself:
looking for drafts, masks that are filled behind them, and what a step does once if any sequence has a draft. On a model
whose steps take a few milliseconds that can be more than drafts save. So now and then a few steps are planned without drafts, and
the time of a token is compared. The more drafts save, the rarer that is.

A batch of another size is another comparison: sizes of the same magnitude share one.

Only steps that tell something are counted, whatever comes between them. Beside prompts, these are steps in which the answers take most of the time:
the forecast for a long chunk errs by more than drafts cost.
"""

from enum import Enum
from typing import NamedTuple

from radixrt.scheduler.step_times import RecentRatio

STEPS_ON, STEPS_OFF = 28, 4
"""Steps with drafts, and then without, while the comparison is not clear."""

CLEAR_GAIN = 1.15
"""Drafts that save more than this are compared only every CLEAR_EVERY-th time."""
CLEAR_EVERY = 16

STEPS_TO_KNOW = 8
"""Steps of each kind before they are compared."""

MIN_REST, MAX_REST = 64, 512
"""Steps without drafts after drafts have not paid: twice as many each time."""

_MAX_NOISE = 2.0
"""Of the forecast: a longer step counts as this. The machine pauses now and then."""


class _Phase(Enum):
    ON = 0
    OFF = 1
    """A few steps without drafts, to compare."""
    REST = 2
    """Drafts do not pay."""


class ComparedStep(NamedTuple):
    """A step, with forecasts in seconds."""

    rows: int
    """Its sequences that decode."""
    new_tokens: int
    """Of answers."""
    answers_s: float
    """Without drafts, and without prompts."""
    plain_s: float
    """Without drafts."""
    forecast_s: float
    drafts: bool
    """It was planned with drafts."""


class DraftTrials:
    """The comparisons of all batch sizes."""

    def __init__(self) -> None:
        self._by_magnitude: dict[int, _Trial] = {}

    def wants_drafts(self, rows: int) -> bool:
        """Whether the next step, of this number of sequences, is to have drafts."""
        return self._of(rows).wants_drafts

    def observe(self, step: ComparedStep, seconds: float) -> None:
        """Note a step in which drafts might have paid, and the ``seconds`` that it took; 0: unknown."""
        prompts_s = step.plain_s - step.answers_s
        if seconds > 0 and step.rows and prompts_s < step.answers_s:
            bounded_s = min(seconds, _MAX_NOISE * step.forecast_s)
            as_plain_s = prompts_s + step.answers_s * step.new_tokens / step.rows
            self._of(step.rows).observe(bounded_s, as_plain_s, drafts=step.drafts)

    def encourage(self) -> None:
        """A sequence has come whose answer is perhaps known: try drafts again."""
        for trial in self._by_magnitude.values():
            trial.encourage()

    def _of(self, rows: int) -> "_Trial":
        return self._by_magnitude.setdefault(rows.bit_length(), _Trial())


class _Trial:
    """The comparison for one magnitude of batches."""

    def __init__(self) -> None:
        self._phase = _Phase.ON
        self._left = STEPS_ON
        """Steps of the phase to come."""
        self._rest = MIN_REST
        self._begin_on()
        self._off = RecentRatio()
        self._num_off = 0

    def _begin_on(self) -> None:
        self._on = RecentRatio()
        self._num_on = 0

    @property
    def wants_drafts(self) -> bool:
        return self._phase is _Phase.ON

    def observe(self, seconds: float, plain_s: float, *, drafts: bool) -> None:
        """Note a step, and the time in which plain steps would give as much."""
        if drafts:
            self._on.observe(seconds, plain_s)
            self._num_on += 1
        else:
            self._off.observe(seconds, plain_s)
            self._num_off += 1
        if drafts == self.wants_drafts:  # otherwise it was planned in the phase before
            self._left -= 1
        if self._left <= 0:
            self._next_phase()

    def encourage(self) -> None:
        if self._phase is _Phase.REST:
            self._begin_on()
            self._phase, self._left = _Phase.ON, 2 * STEPS_ON

    @property
    def _gain(self) -> float | None:
        """Tokens a second with drafts, in times of those without; None: not known yet."""
        if min(self._num_on, self._num_off) < STEPS_TO_KNOW:
            return None
        return self._off.value / self._on.value

    def _next_phase(self) -> None:
        gain = self._gain
        if self._phase is _Phase.ON and gain is not None and gain < 1:
            self._phase, self._left = _Phase.REST, self._rest
            self._rest = min(2 * self._rest, MAX_REST)
            return
        if self._phase is _Phase.ON:
            self._phase, self._left = _Phase.OFF, STEPS_OFF
            return
        if self._phase is _Phase.REST:
            self._begin_on()
        elif gain is not None and gain > 1:
            self._rest = MIN_REST
        clear = gain is not None and gain > CLEAR_GAIN
        self._phase = _Phase.ON
        self._left = STEPS_ON * (CLEAR_EVERY if clear else 1)
