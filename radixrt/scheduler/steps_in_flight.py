"""The steps that the worker was sent, with the sequences that will get their tokens."""

from collections import deque
from dataclasses import dataclass

from radixrt.messages.steps import StepResult
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.step_times import StepShape


@dataclass(slots=True)
class StepInFlight:
    """A step without a result yet."""

    step_id: int
    sequences: list[Sequence | None]
    """The sequence that gets the tokens, by slot; None: they are dropped."""
    shape: StepShape
    follows: bool
    """It was sent while another step was in flight, so a worker that waited for it waited for the
    scheduler."""
    scored: int
    """Prompt tokens with log-probabilities."""
    progress: dict[int, int]
    """Tokens of a prompt that are computed when it has ended, by slot, where a client wants to
    know."""


class StepsInFlight:
    """A queue: the worker answers steps in the order in which they were sent."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.next_id = 0
        """Id of the next step."""

    def __len__(self) -> int:
        return len(self._steps)

    def send(
        self,
        sequences: list[Sequence | None],
        shape: StepShape,
        *,
        scored: int = 0,
        progress: dict[int, int] | None = None,
    ) -> int:
        """Note a step for the sequences in the slots now; returns its id."""
        step_id = self.next_id
        self.next_id += 1
        follows, known = bool(self._steps), progress or {}
        step = StepInFlight(step_id, sequences.copy(), shape, follows, scored, known)
        self._steps.append(step)
        return step_id

    def shapes(self) -> list[StepShape]:
        """The shapes of the steps, in order."""
        return [step.shape for step in self._steps]

    def take(self, result: StepResult) -> StepInFlight:
        """Remove and return the step of a result."""
        step = self._steps.popleft()
        assert step.step_id == result.step_id, "the worker answered steps out of order"
        return step

    def forget(self, sequence: Sequence) -> None:
        """Drop the tokens in flight of a sequence."""
        for step in self._steps:
            if step.sequences[sequence.slot] is sequence:
                step.sequences[sequence.slot] = None
