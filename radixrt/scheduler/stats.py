"""What the scheduler counts."""

from bisect import bisect_left
from dataclasses import dataclass, field

from radixrt.messages import HistogramSnapshot, StepResult

STEP_BOUNDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
PLAN_BOUNDS = [1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25]


class Histogram:
    """Counts of observations between fixed bounds, in seconds."""

    def __init__(self, bounds: list[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def snapshot(self) -> HistogramSnapshot:
        return HistogramSnapshot(self._bounds, list(self._counts), self._total)


@dataclass
class Counters:
    """Totals since start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    output_tokens: int = 0
    forced_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    refused: int = 0
    retractions: int = 0
    steps: int = 0
    forward_seconds: float = 0.0
    wait_seconds: float = 0.0
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS))
    plan_seconds: Histogram = field(default_factory=lambda: Histogram(PLAN_BOUNDS))

    def observe_step(self, result: StepResult, follows: bool) -> None:
        """Count a step that came back; a worker waited for us only if its plan ``follows`` another."""
        self.steps += 1
        self.step_seconds.observe(result.step_s)
        self.forward_seconds += result.forward_s
        self.wait_seconds += result.wait_s if follows else 0.0
