"""Learns the time of a step from its content, and sizes prefill chunks by it.

A step's time is forecast as a sum: a constant, and a cost per decoding row, per token of context
that these rows read, per prompt token, and per pair of a prompt token and a token that it attends
to. The five costs are learned from the times that the worker reports (``StepResult.step_s``, which
is the time on the device where steps overlap, and excludes waits for plans), by least squares with
exponential forgetting:

- Errors count relative to the longer one of the time and its forecast, so that a pause of the
  machine weighs little; a lasting change is learned within some hundred steps.
- Costs are never negative (coordinate descent on the normal equations), so more work is never
  forecast to take less time.
- A step makes the learner forget only the costs that it has a part in.

The bound of a step is a multiple of the step of one answer, of which there is a record of its own
(:class:`ShortestStep`): where all steps are as long as their bound, a smaller constant and dearer
tokens fit as well, and the bound would follow. Sarathi-Serve (Agrawal et al., OSDI 2024) bounds the
tokens of a step, and profiles the bound offline; the cost of a token depends on the device, the
model and the context before it.
"""

import math
import operator
from typing import NamedTuple

FORGETTING = 0.95
"""Weight of a step for each step after it: the last 20 steps decide."""

DECODE_STEPS_PER_UPDATE = 4
"""Once costs are known, only every fourth pure decode step is learned from: they resemble each
other, and each costs some microseconds."""

WARM_UP_STEPS = 3
"""Steps at the start whose times are not learned: kernels are loaded in them."""

FIRST_TOKENS = 64
"""Most prompt tokens of the first step."""

FIRST_SCORED = 32
"""Most prompt tokens with log-probabilities of a step while nobody knows what these cost. Each
computes the logits of the whole vocabulary, which may take longer than the rest of the model."""

STEPS_OF_ONE_ANSWER = 4.0
MIN_MS, MAX_MS = 15.0, 150.0
"""The default of ``--max-step-ms``: four times the step of one answer for prompts, on top of the
step of the running answers, within these bounds. With the same bound for any number of answers,
sixteen of them took half of each step, and all weights were read for few prompt tokens."""

NO_BOUND, NO_BOUND_S = 1 << 30, 1e9
"""More tokens, and more seconds, than any step has."""

FEW_TOKENS = 16
"""Steps of so few tokens take about as long as that of one answer: they wait for weights from
memory."""

SHORTER_COUNTS, LONGER_COUNTS = 1 / 4, 1 / 32
"""Parts of the difference by which the time of the shortest step follows another one."""
_MAX_LONGER = 2.0
"""Times of the shortest step: a longer one counts as this. The machine pauses now and then."""

_KEPT = math.sqrt(FORGETTING)
_UNITS = (1.0, 16.0, 16384.0, 128.0, 128.0 * 2048.0)
"""Units of the features, so that all are about 1."""

_SWEEPS = 2
"""Sweeps of the coordinate descent after each step. It goes on from the costs before."""


class StepShape(NamedTuple):
    """The content of a step, as far as its time depends on it."""

    rows: int
    """Decoding sequences, one token each, and the forced and drafted tokens behind these."""
    context: int
    """Tokens that these rows attend to."""
    tokens: int = 0
    """Prompt tokens."""
    pairs: int = 0
    """Pairs of a prompt token and a token before it."""

    def with_chunk(self, start: int, tokens: int) -> "StepShape":
        """This step with a further prefill chunk."""
        pairs = self.pairs + attended_pairs(start, tokens)
        return self._replace(tokens=self.tokens + tokens, pairs=pairs)


_ONE_ANSWER = StepShape(rows=1, context=0)


def attended_pairs(start: int, tokens: int) -> int:
    """Pairs of a token of a chunk and a token that it attends to.

    >>> attended_pairs(10, 2)
    22
    """
    return tokens * start + tokens * tokens // 2


class ShortestStep:
    """The time of a step of as few tokens as there have been, and at most FEW_TOKENS.

    Pauses make a step longer, and nothing makes it shorter. So the time follows shorter steps soon,
    and longer ones slowly.
    """

    def __init__(self) -> None:
        self._tokens = FEW_TOKENS + 1
        self.seconds = 0.0
        """0: there has been no step."""

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens < self._tokens:
            self._tokens, self.seconds = tokens, min(seconds, self.seconds or seconds)
        longer_s = min(seconds, _MAX_LONGER * self.seconds) - self.seconds
        if longer_s < 0:
            self.seconds += SHORTER_COUNTS * longer_s
        elif tokens == self._tokens:
            self.seconds += LONGER_COUNTS * longer_s


class StepTimes:
    """Forecasts step times in seconds.

    Args:
        max_step_ms: as in :class:`radixrt.base.config.SchedulerSettings`: None is the default, 0 is
            no bound.
    """

    def __init__(self, max_step_ms: float | None) -> None:
        self._max_step_ms = max_step_ms
        self._costs = [0.0] * len(_UNITS)
        """Seconds per unit of each feature."""
        self._normal = [[0.0] * len(_UNITS) for _ in _UNITS]
        """Weighted sum of the products of the features, [5, 5]."""
        self._gradient = [0.0] * len(_UNITS)
        """Weighted sum of the products of features and errors; 0 where the squared error is
        least."""
        self._shortest = ShortestStep()
        self._observed = 0
        self._decode_steps = 0
        """Without drafts."""
        self._learned = 0
        self._largest_prefill = FIRST_TOKENS // 2
        self._decode_s = RecentRatio()
        self._prefill_s = RecentRatio()
        self._scored_s = RecentRatio()

    # ------------------------------------------------------------ learning

    def observe(
        self,
        shape: StepShape,
        seconds: float,
        new_tokens: int | None = None,
        *,
        has_drafts: bool = False,
        scored: int = 0,
    ) -> None:
        """Learn from a step.

        Args:
            seconds: 0 stands for an unknown time.
            new_tokens: of answers, if they are not one a row: rows of rejected drafts gave none.
            has_drafts: the costs are not learned. Many rows compute where few wait for memory, so a
                line through both would make the step of one answer too short, and the chunks beside
                answers with it.
            scored: prompt tokens with log-probabilities. What they take beyond the forecast is
                their cost, once the others are known.
        """
        self._observed += 1
        self._largest_prefill = max(self._largest_prefill, shape.tokens)
        if seconds <= 0 or self._observed <= WARM_UP_STEPS:
            return
        if scored and self.is_known:
            self._scored_s.observe(max(0.0, seconds - self.seconds(shape)), scored)
            return
        self._shortest.observe(shape.rows + shape.tokens, seconds)
        features = _features(shape)
        if not has_drafts:
            self._decode_steps += not shape.tokens
            is_like_others = self._decode_steps % DECODE_STEPS_PER_UPDATE > 0 and self.is_known
            if not shape.tokens and is_like_others:
                return
            self._update(features, seconds)
            self._learned += 1
        self._observe_rates(
            features, shape, seconds, shape.rows if new_tokens is None else new_tokens
        )

    def _update(self, features: list[float], seconds: float) -> None:
        forecast = _dot(features, self._costs)
        longer = max(seconds, forecast)
        weighted = [feature / (longer * longer) for feature in features]
        kept = [_KEPT if feature else 1.0 for feature in features]
        error = seconds - forecast
        for i, row in enumerate(self._normal):
            keep, weight = kept[i], weighted[i]
            self._gradient[i] = keep * self._gradient[i] + weight * error
            for j, feature in enumerate(features):
                row[j] = keep * kept[j] * row[j] + weight * feature
        for _ in range(_SWEEPS):
            self._descend()

    def _descend(self) -> None:
        """Move each cost to the least squared error, but not below 0."""
        costs, gradient = self._costs, self._gradient
        for i, row in enumerate(self._normal):
            if row[i] > 0:
                change = max(gradient[i] / row[i], -costs[i])
                costs[i] += change
                for j, product in enumerate(row):
                    gradient[j] -= change * product

    def _observe_rates(
        self, features: list[float], shape: StepShape, seconds: float, new_tokens: int
    ) -> None:
        """Divide a step's time between its prompts and its answers, as forecast."""
        prompts = _dot(features[3:], self._costs[3:])
        share = prompts / (prompts + _dot(features[:3], self._costs[:3]) or 1.0)
        if shape.tokens:
            self._prefill_s.observe(seconds * share, shape.tokens)
        if new_tokens:
            self._decode_s.observe(seconds * (1 - share), new_tokens)

    # ------------------------------------------------------------ forecasts

    @property
    def is_known(self) -> bool:
        """Whether enough steps have been observed for a forecast."""
        return self._learned >= 2 * len(_UNITS)

    @property
    def seconds_per_prompt_token(self) -> float:
        """The time in the last steps, without what a step costs in any case; 0 if unknown."""
        return self._prefill_s.value

    @property
    def seconds_per_output_token(self) -> float:
        """The time in the last steps, with its share of what a step costs in any case; 0 if
        unknown."""
        return self._decode_s.value

    def seconds(self, shape: StepShape) -> float:
        """The forecast time of a step."""
        return _dot(_features(shape), self._costs)

    def chunk_seconds(self, start: int, tokens: int) -> float:
        """Time that a prefill chunk from position ``start`` adds to a step."""
        by_token, by_pair = self.prefill_costs
        return by_token * tokens + by_pair * attended_pairs(start, tokens)

    def scored_seconds(self, scored: int) -> float:
        """Time that log-probabilities of prompt tokens add to a step."""
        return self._scored_s.value * scored

    def scored_within(self, seconds: float, start: int) -> int:
        """As :meth:`tokens_within`, for prompt tokens with log-probabilities."""
        most = FIRST_SCORED if self.is_known and not self._scored_s.is_known else NO_BOUND
        return min(most, self.tokens_within(seconds, start, self._scored_s.value))

    def tokens_within(self, seconds: float, start: int, more_s: float = 0.0) -> int:
        """Most prompt tokens from position ``start`` that add at most ``seconds`` to a step.

        Args:
            more_s: what each takes beyond the cost of a prompt token.
        """
        by_token, by_pair = self.prefill_costs
        slope = by_token + more_s + by_pair * start
        if by_pair > 0:
            root = math.sqrt(slope * slope + 2 * by_pair * seconds)
            return min(int((root - slope) / by_pair), NO_BOUND)
        return min(int(seconds / slope), NO_BOUND) if slope > 0 else NO_BOUND

    @property
    def prefill_costs(self) -> tuple[float, float]:
        """Seconds per prompt token, and per attended pair; 0 if unknown."""
        return self._costs[3] / _UNITS[3], self._costs[4] / _UNITS[4]

    # ------------------------------------------------------------ the bound of a step

    def max_step_s(self, decode: StepShape) -> float:
        """The bound of the time of a step with these decoding rows: that of ``--max-step-ms``."""
        if self._max_step_ms is None:
            one_answer_s = self._shortest.seconds or self.seconds(_ONE_ANSWER)
            more_s = max(0.0, self.seconds(decode) - self.seconds(_ONE_ANSWER))
            most_ms = 1e3 * ((STEPS_OF_ONE_ANSWER + 1) * one_answer_s + more_s)
            return min(max(most_ms, MIN_MS), MAX_MS) / 1e3
        return self._max_step_ms / 1e3 if self._max_step_ms > 0 else NO_BOUND_S

    def prefill_seconds(self, decode: StepShape) -> float:
        """Time for prompts in a step beside these decoding rows.

        It is never less than a third of the rows' own time: where answers alone fill the step,
        prompts go on too.
        """
        decode_s = self.seconds(decode)
        return max(self.max_step_s(decode) - decode_s, decode_s / 3)

    def most_prefill_tokens(self) -> int:
        """Most prompt tokens of the next step while costs are little known."""
        return NO_BOUND if self._max_step_ms == 0 else 2 * self._largest_prefill


def _features(shape: StepShape) -> list[float]:
    return [count / unit for count, unit in zip((1, *shape), _UNITS, strict=True)]


def _dot(left: list[float], right: list[float]) -> float:
    return sum(map(operator.mul, left, right))


class RecentRatio:
    """A ratio of two sums over the last steps; ``kept`` is the weight of a step for each step after
    it."""

    def __init__(self, kept: float = FORGETTING) -> None:
        self._kept = kept
        self._seconds = self._count = 0.0

    def observe(self, seconds: float, count: float) -> None:
        self._seconds = self._kept * self._seconds + seconds
        self._count = self._kept * self._count + count

    @property
    def is_known(self) -> bool:
        return self._count > 0

    @property
    def value(self) -> float:
        return self._seconds / self._count if self._count else 0.0
