"""Sequences of the lowest priority: prompts that are computed ahead while nothing else waits or runs.

A real request is delayed by at most one step: one idle step is in flight at a time, it is short,
and the next plan sets the sequence aside if anything else has come. What it has computed stays in
the tree. Behind a step of a real request nothing is computed for QUIET_S: on a CPU an idle step
takes all cores, and the last tokens of an answer, still on their way to the client, would wait for
it.

Prompts that arrive in pieces come first, and are computed as fast as they arrive: this work is only
done earlier. Prompts that are merely expected take at most a share of the time, so that a machine
without requests rests.
"""

from collections import OrderedDict
from collections.abc import Callable

from radixrt.messages.sequences import SequenceRefused
from radixrt.scheduler.sequence import Sequence

IDLE_STEP_S = 0.05
"""Longest time of an idle step, by forecast."""

QUIET_S = 0.02
"""Seconds without idle work behind a step of a real request. Some milliseconds suffice for the way
to the client; with none, the 99th percentile of the gaps between tokens was the time of an idle
step (``python -m bench.pieces --only idle``)."""

MAX_IDLE_SEQUENCES = 256
"""Sequences that may wait; further ones are refused."""


class IdleWork:
    """The idle sequences that wait, the oldest first, and the one that is in a slot.

    Args:
        share: of the time that steps of expected prompts may take; 0: there are no idle steps.
    """

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._share = share
        self._clock = clock
        self._waiting: OrderedDict[int, Sequence] = OrderedDict()
        self.running: Sequence | None = None
        """The sequence in a slot whose prompt is partly computed."""
        self._rests_until = 0.0
        self._quiet_until = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def refusal(self, sequence: Sequence) -> SequenceRefused | None:
        """Why a sequence cannot wait here; None: it can."""
        if self._share > 0 and len(self) < MAX_IDLE_SEQUENCES:
            return None
        reason = (
            "computes nothing ahead (--idle-share 0)" if self._share == 0 else "has too much of it"
        )
        message = f"This is work for idle times, and the server {reason}; leave it out."
        return SequenceRefused(sequence.seq_id, message, 400 if self._share == 0 else 503, None)

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        self._waiting[sequence.seq_id] = sequence
        if first:
            self._waiting.move_to_end(sequence.seq_id, last=False)

    def remove(self, seq_id: int) -> None:
        """Remove a sequence; does nothing if it does not wait here."""
        self._waiting.pop(seq_id, None)

    def left(self, sequence: Sequence) -> None:
        """A sequence has left its slot, or its prompt is completely planned."""
        if self.running is sequence:
            self.running = None

    def next(self) -> Sequence | None:
        """The sequence to compute now; None: there is none, or it is time to rest."""
        first = self._first()
        return None if first is None or self.rests(first) else first

    def _first(self) -> Sequence | None:
        waiting = self._waiting.values()
        return next(filter(_is_arriving, waiting), None) or next(iter(waiting), None)

    def must_yield(self, sequence: Sequence) -> bool:
        """Whether a sequence that runs makes place for one whose prompt is arriving."""
        return not _is_arriving(sequence) and any(map(_is_arriving, self._waiting.values()))

    def rests(self, sequence: Sequence) -> bool:
        """Whether it is too early for the next step of a sequence."""
        return self._clock() < self._goes_on_at(sequence)

    def _goes_on_at(self, sequence: Sequence) -> float:
        if _is_arriving(sequence):
            return self._quiet_until
        return max(self._quiet_until, self._rests_until)

    def took(self, seconds: float) -> None:
        """An idle step took this time."""
        self._rests_until = self._clock() + seconds * (1 / self._share - 1)

    def keep_quiet(self) -> None:
        """A step of a real request has ended."""
        self._quiet_until = self._clock() + QUIET_S

    def seconds_to_rest(self) -> float | None:
        """Time until there is something to do; None: nothing waits for it."""
        if (sequence := self._first() or self.running) is None:
            return None
        left = self._goes_on_at(sequence) - self._clock()
        return left if left > 0 else None


def _is_arriving(sequence: Sequence) -> bool:
    return sequence.options.idle == "arriving"
