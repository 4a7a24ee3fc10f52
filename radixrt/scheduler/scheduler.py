"""Continuous batching: who wants tokens, and who gets those that come back?

The scheduler is a plain state machine without sockets: :meth:`Scheduler.add` and
:meth:`Scheduler.release` change who wants tokens, :meth:`Scheduler.plan` makes the next step,
:meth:`Scheduler.absorb` takes a step's tokens back. Up to two steps are in flight, so a plan is made one
step before the tokens of the step ahead of it are known; a sequence that turns out to have ended has one
surplus token under way, which is thrown away.
"""

import heapq
import time
from collections.abc import Callable

from radixrt.messages.answers import AnswerReport, FinishReason
from radixrt.messages.ids import num_ids, unpack_ids
from radixrt.messages.sequences import (
    SequenceRefused,
    SequenceRequest,
    TokenBatch,
)
from radixrt.messages.stats import SchedulerStats
from radixrt.messages.steps import (
    GRAMMAR_FAILED,
    NO_TOKEN,
    GrammarLoaded,
    StepPlan,
    StepResult,
)
from radixrt.scheduler.batch_draft import BatchDraft
from radixrt.scheduler.grammar_shelf import GrammarShelf
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.planner import Planner
from radixrt.scheduler.queue.queue_order import ORDERS
from radixrt.scheduler.queue.waiting_queue import WaitingQueue
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.sequence import NO_SLOT, Sequence
from radixrt.scheduler.slot_table import SlotTable
from radixrt.scheduler.stats import count_step, new_counters, stats_of
from radixrt.scheduler.steps_in_flight import StepInFlight, StepsInFlight

_FAILURES = {
    NO_TOKEN: (
        500,
        "The model computed logits that are not finite: the checkpoint may be damaged, or float16 overflowed (then "
        "serve with --dtype bfloat16 or float32).",
    ),
    GRAMMAR_FAILED: (
        422,
        "The answer can't go on within its grammar: no token of the model's vocabulary fits, or the grammar is too "
        "complex at this point. Simplify the schema, regex or grammar.",
    ),
}
"""HTTP status and reason, by what stands in place of a token."""


class Scheduler:
    """Decides who runs. Owns the queues, the slots and the KV pages.

    Args:
        clock: seconds from any fixed moment; a replay of recorded traffic brings its own.
    """

    def __init__(
        self, limits: SchedulerLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.slots = SlotTable(
            limits.max_running_requests,
            -(-limits.context_length // limits.page_size),
            limits.page_size,
        )
        self.kv = KVCache(limits, self.slots, clock)
        self.waiting = WaitingQueue(ORDERS[limits.schedule_policy], self.kv)
        self.grammars = GrammarShelf(limits.num_ranks)
        self.counters = new_counters()
        self._sequences: dict[int, Sequence] = {}
        self._in_flight = StepsInFlight()
        self.planner = Planner(
            limits, self.slots, self.kv, self.waiting, self._in_flight, self.counters, clock
        )
        self._deadlines: list[tuple[float, int]] = []

    # ------------------------------------------------------------ arrivals and departures

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_running(self) -> int:
        return self.slots.num_used

    def add(self, request: SequenceRequest) -> SequenceRefused | None:
        """Queue a sequence, or say why not."""
        num_prompt = num_ids(request.token_ids) - request.num_output
        max_tokens = num_prompt + (request.sampling.max_tokens or 0)
        if max_tokens > min(
            self.limits.context_length, self.limits.num_pages * self.limits.page_size
        ):
            return SequenceRefused(
                request.seq_id, f"{max_tokens} tokens do not fit this engine.", 400
            )
        num_waiting = len(self.waiting) + self.grammars.num_waiting
        if num_waiting >= self.limits.max_queued_requests:
            self.counters.refused += 1
            message = f"The server's queue is full ({num_waiting} sequences wait); retry later."
            return SequenceRefused(request.seq_id, message, 503, self._seconds_until_room())
        grammar = None
        if request.constraint is not None:
            grammar = self.grammars.use(request.constraint, request.num_output)
        sequence = Sequence(request, self.clock(), self.limits.eos_token_ids, grammar)
        self._sequences[sequence.seq_id] = sequence
        if request.options.deadline is not None:
            heapq.heappush(self._deadlines, (request.options.deadline, sequence.seq_id))
        if grammar is not None and self.grammars.is_loading(grammar):
            self.grammars.wait(sequence)
        else:
            self.waiting.add(sequence)
        return None

    def grammar_loaded(self, message: GrammarLoaded) -> list[SequenceRefused]:
        """Queue the sequences that have waited for a grammar, or refuse them."""
        waited = self.grammars.loaded(message)
        if message.error is None:
            for sequence in waited:
                self.waiting.add(sequence)
            return []
        for sequence in waited:
            del self._sequences[sequence.seq_id]
        self.counters.refused += len(waited)
        return [SequenceRefused(sequence.seq_id, message.error, 400) for sequence in waited]

    def _seconds_until_room(self) -> int:
        """A guess from the mean step time: one running batch's worth of answers."""
        steps = self.counters.steps
        mean_step_s = self.counters.step_seconds.total / steps if steps else 0.1
        mean_output = self.planner.admission.outputs.mean()
        if mean_output is None:
            mean_output = sum(s.max_output / 2 for s in self.slots.running()) / max(
                1, self.num_running
            )
        return max(1, min(60, round(mean_step_s * mean_output)))

    def release(self, seq_ids: Pages, *, complete: bool = False) -> None:
        """Drop sequences of which nobody wants more tokens; unknown ids are ignored.

        Args:
            complete: their answers are: a stop string ended them.
        """
        for seq_id in seq_ids.tolist():
            sequence = self._sequences.get(seq_id)
            if sequence is None:
                continue
            if complete:
                self._count_finish(sequence)
            else:
                self.counters.aborted += 1
            self._remove(sequence)

    def drop_expired(self, now: float) -> dict[int, AnswerReport]:
        """Drop sequences whose deadline has passed, and leases whose time is over; ``now`` is Unix time.

        Returns:
            The final reports of these sequences, by their ids.
        """
        self.kv.leases.expire()
        dropped: dict[int, AnswerReport] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            _, seq_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(seq_id)
            if sequence is not None:
                self.counters.aborted += 1
                dropped[seq_id] = sequence.end("abort", self.clock())
                self._remove(sequence)
        return dropped

    def next_deadline(self) -> float | None:
        """Unix time of the earliest deadline; of a sequence that may have ended already."""
        return self._deadlines[0][0] if self._deadlines else None

    def flush_cache(self) -> int:
        """Empty the tree of all that no running sequence uses and no lease holds; returns the pages freed."""
        return self.kv.flush()

    def release_session(self, session: str, salt: str = "") -> int:
        """A session has ended: what it alone has used goes first from now on; returns so many tokens."""
        return self.kv.sessions.release(session, salt) * self.limits.page_size

    def _remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        del self._sequences[sequence.seq_id]
        if self.grammars.release(sequence):
            return  # it was waiting for its grammar
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence.seq_id)
        else:
            self.planner.leave(sequence)

    # ------------------------------------------------------------ steps

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute until a result or a request comes in."""
        return self.planner.plan()

    def absorb(self, result: StepResult) -> TokenBatch:
        """Take the tokens of the oldest step in flight; ends the sequences they end."""
        step, draft = self._in_flight.take(result), BatchDraft()
        count_step(self.counters, result, step.follows)
        draft.add_logprobs(result, step)
        self._absorb_jumps(result, step)
        for slot, token in zip(
            unpack_ids(result.slots).tolist(), unpack_ids(result.token_ids).tolist(), strict=True
        ):
            sequence = step.owners[slot]
            if sequence is not None and not self._goes_on(sequence, token, draft):
                step.owners[slot] = None  # tokens forced beyond the end are dropped
        self.counters.output_tokens += len(draft.token_ids)
        return draft.seal()

    def _goes_on(self, sequence: Sequence, token: int, draft: BatchDraft) -> bool:
        """Give a sequence its next token; False if it was the last, or none could be sampled."""
        if token in _FAILURES:
            draft.refused.append(self._fail(sequence, *_FAILURES[token]))
            return False
        if sequence.first_token is None:
            report = draft.started[sequence.seq_id] = sequence.start(self.clock())
            self.counters.cache_write_tokens += report.cache_write_tokens
        if sequence.max_output == 0:  # only its KV was wanted
            draft.finished[sequence.seq_id] = self._finish(sequence, "length", token)
            return False
        sequence.append(token)
        draft.add_token(sequence.seq_id, token)
        reason = sequence.finish_reason(token)
        if reason is None:
            return True
        draft.finished[sequence.seq_id] = self._finish(sequence, reason, token)
        return False

    def _finish(self, sequence: Sequence, reason: FinishReason, token: int) -> AnswerReport:
        self._count_finish(sequence)
        self._remove(sequence)
        return sequence.end(reason, self.clock(), token)

    def _count_finish(self, sequence: Sequence) -> None:
        self.counters.finished += 1
        if sequence.max_output > 0:
            self.planner.admission.outputs.observe(sequence.num_output)

    def _absorb_jumps(self, result: StepResult, step: StepInFlight) -> None:
        """Sequences that forced tokens brought further than their plan said."""
        jumped, beyond = unpack_ids(result.jump_slots), unpack_ids(result.jump_tokens)
        for slot, num_tokens in zip(jumped.tolist(), beyond.tolist(), strict=True):
            if step.owners[slot] is not None:
                self.slots.planned[slot] += num_tokens
                self.counters.forced_tokens += num_tokens

    def _fail(self, sequence: Sequence, status: int, message: str) -> SequenceRefused:
        """End a sequence that the model can't go on with. Its KV may be the cause and is not kept."""
        self.counters.aborted += 1
        del self._sequences[sequence.seq_id]
        self.grammars.release(sequence)
        self.planner.leave(sequence, keep_kv=False)
        return SequenceRefused(sequence.seq_id, message, status)

    # ------------------------------------------------------------ inspection

    def stats(self, malformed_frames: int = 0) -> SchedulerStats:
        """A snapshot of all counters and gauges."""
        return stats_of(
            self.counters,
            self.kv,
            running=self.num_running,
            waiting=len(self.waiting),
            grammars=len(self.grammars),
            malformed_frames=malformed_frames,
        )
