"""The planner forecasts which part of the tokens to come drafts can save steps for."""

import pytest

from radixrt.messages.steps import StepPlan
from radixrt.scheduler.step_times import StepShape
from tests.scheduler.timed_engine import TimedEngine

STEP_S, ROW_S = 0.020, 0.001


@pytest.mark.parametrize(("length", "pays"), [(8, False), (400, True)])
def test_beside_prompts_that_fill_each_step_drafts_save_in_answers_that_outlast_them(
    length: int, pays: bool
) -> None:
    """A short answer ends while the prompts are computed, in as many steps with drafts as
    without."""

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
    saving = [plans[number].draft_saving for number in beside][10:40]
    assert all(part > 0.5 if pays else part == 0.0 for part in saving), saving
    after = [plan.draft_saving for plan in plans[beside[-1] + 1 :]]
    assert len(after) > 100 and set(after) == {1.0}, "the answer alone"
