"""The scheduler's counters."""

from radixrt.messages.stats import Counters, TimeHistogram
from radixrt.messages.steps import StepResult

STEP_BOUNDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0]
PLAN_BOUNDS = [1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 5e-2, 0.25]
"""In seconds."""


def new_counters() -> Counters:
    return Counters(
        step_seconds=TimeHistogram.empty(STEP_BOUNDS), plan_seconds=TimeHistogram.empty(PLAN_BOUNDS)
    )


def count_step(counters: Counters, result: StepResult, follows: bool) -> None:
    """Count a finished step. The worker's wait counts only if the plan ``follows`` another in flight."""
    counters.steps += 1
    counters.step_seconds.observe(result.step_s)
    counters.forward_seconds += result.forward_s
    counters.wait_seconds += result.wait_s if follows else 0.0
