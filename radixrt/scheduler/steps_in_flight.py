"""Which steps has the worker been sent, and whose are the tokens that will come back?"""

from collections import deque
from dataclasses import dataclass

from radixrt.messages.steps import StepResult
from radixrt.scheduler.sequence import Sequence


@dataclass(slots=True)
class StepInFlight:
    """A step that was sent and is not back."""

    step_id: int
    owners: list[Sequence | None]
    """Whose tokens these are, by slot; None once nobody wants them."""
    follows: bool
    """It was sent while another step was in flight: a worker that waited for it waited for us."""


class StepsInFlight:
    """The worker answers in the order in which it was sent the steps."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def send(self, owners: list[Sequence | None]) -> int:
        """Note a step for the sequences that own the slots now; returns its id."""
        step_id = self._next_id
        self._next_id += 1
        self._steps.append(StepInFlight(step_id, owners.copy(), follows=bool(self._steps)))
        return step_id

    def take(self, result: StepResult) -> StepInFlight:
        """The step that this is the result of."""
        step = self._steps.popleft()
        assert step.step_id == result.step_id, "the worker answered steps out of order"
        return step

    def forget(self, sequence: Sequence) -> None:
        """Nobody wants the tokens that are under way for this sequence."""
        for step in self._steps:
            if step.owners[sequence.slot] is sequence:
                step.owners[sequence.slot] = None
