"""A worker without a model, on a virtual clock.

The time model has two constants: prompts are computed at a fixed rate, and a decode step adds a
fixed time for one token of each decoding sequence. It does not predict a real device. It gives
queues and pauses of a plausible length, which are the same for all compared policies.
"""

from dataclasses import dataclass

from radixrt.messages.ids import num_ids, pack_ids
from radixrt.messages.steps import StepPlan, StepResult

END_OF_ANSWER = 2**31 - 1
FIRST_ANSWER_TOKEN = 2**30
"""Simulated answers count up from here: no prompt continues them."""


@dataclass(frozen=True)
class ServiceModel:
    """Rates of the simulated device."""

    prefill_tokens_per_s: float = 100_000.0
    decode_step_s: float = 0.01
    """Duration of a step with one token for each running sequence."""
    tokens_per_symbol: int = 8
    """Tokens that stand behind each simulated one, see :mod:`radixrt.bench.cache.replay`."""

    def step_seconds(self, prefill_symbols: int, num_decoding: int) -> float:
        prefill_s = prefill_symbols * self.tokens_per_symbol / self.prefill_tokens_per_s
        return prefill_s + (self.decode_step_s * self.tokens_per_symbol if num_decoding else 0.0)


class VirtualClock:
    """Seconds since the trace began."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedWorker:
    """Executes step plans: samples tokens, and ends every answer at its recorded length."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        """Symbols that the prompt in a slot has in all."""
        self._decoding: dict[int, None] = {}
        self._left: dict[int, int] = {}
        """Symbols that the answer in a slot will still get."""
        self._next_symbol = FIRST_ANSWER_TOKEN

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def begin(self, plan: StepPlan, answer_lengths: dict[int, int]) -> int:
        """Take in a plan; returns the prompt symbols that it computes.

        Args:
            answer_lengths: symbols still to come, for each slot that the plan admits.
        """
        for slot in plan.release:
            self._decoding.pop(slot, None)
        for admit in plan.admit:
            self._known[admit.slot] = num_ids(admit.token_ids)
            self._left[admit.slot] = answer_lengths[admit.slot]
        return sum(chunk.num_tokens for chunk in plan.prefill)

    def finish(self, plan: StepPlan, step_s: float = 0.0) -> StepResult:
        """The step's tokens."""
        for chunk in plan.prefill:
            if chunk.start + chunk.num_tokens == self._known[chunk.slot]:
                self._decoding[chunk.slot] = None
        slots = list(self._decoding)
        symbols = list(range(self._next_symbol, self._next_symbol + len(slots)))
        self._next_symbol = FIRST_ANSWER_TOKEN + (self._next_symbol + len(slots)) % 2**29
        for i, slot in enumerate(slots):
            self._left[slot] -= 1
            if self._left[slot] == 0:
                symbols[i] = END_OF_ANSWER
        return StepResult(
            step_id=plan.step_id, slots=pack_ids(slots), token_ids=pack_ids(symbols), step_s=step_s
        )
