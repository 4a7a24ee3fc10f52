"""Continuous batching: queues sequences, plans steps, and gives the sampled tokens to their
sequences.

The scheduler is a state machine without sockets: :meth:`Scheduler.add` and
:meth:`Scheduler.release` add and drop sequences, :meth:`Scheduler.plan` makes the next step,
:meth:`Scheduler.absorb` takes the result of a step. Up to two steps are in flight, so a step is
planned before the tokens of the step before it are known. A sequence that turns out to have ended
has one surplus token in flight, which is dropped.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from radixrt.messages.answers import AnswerReport, FinishReason
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.grammars import GrammarLoaded
from radixrt.messages.ids import num_ids, unpack_ids
from radixrt.messages.images import ImageLoaded
from radixrt.messages.links import PageMove, WorkerOrder
from radixrt.messages.moves import PagesRead, PagesWritten
from radixrt.messages.requests import Tenant
from radixrt.messages.sequences import (
    PositionLogprobs,
    SequenceOutput,
    SequenceRefused,
    SequenceRequest,
    TokenBatch,
)
from radixrt.messages.stats import SchedulerStats, TenantStats
from radixrt.messages.steps import DRAFTERS, GRAMMAR_FAILED, NO_TOKEN, StepPlan, StepResult
from radixrt.scheduler.adapters import AdapterRegistry
from radixrt.scheduler.disk.pages import DiskPages
from radixrt.scheduler.disk.ranks import RankAnswers
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.loaded_parts import GrammarRegistry, ImageRegistry
from radixrt.scheduler.open_sequences import OpenSequences
from radixrt.scheduler.planner import Planner
from radixrt.scheduler.queue.admission import Admission
from radixrt.scheduler.radix.divergence import RecentFacts
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.shared_answers import SharedAnswers, answer_key
from radixrt.scheduler.state import SchedulerState, StepInFlight

_FAILURES = {
    NO_TOKEN: (
        500,
        "The model computed logits that are not finite: the checkpoint may be damaged, or float16 overflowed (then "
        "serve with --dtype bfloat16 or float32).",
    ),
    GRAMMAR_FAILED: (
        422,
        "The answer can't continue within its grammar: no token of the model's vocabulary fits, or the grammar is too "
        "complex at this point. Simplify the schema, regex or grammar, and if the request has allowed_token_ids or "
        "bad_words, allow more tokens.",
    ),
}
"""HTTP status and reason, by the mark that stands in place of a token."""


_NO_LOGPROBS: list[PositionLogprobs] = []
"""Shared by the outputs of rows without log-probabilities; nothing is ever added to it."""


class Scheduler:
    """Owns the queue, the slots and the KV pages, and plans the worker's steps.

    Args:
        clock: seconds from any fixed moment; a replay of recorded traffic has its own.
        disk: pages that outlive the process; None: there are none.
        kept_adapters: see :class:`AdapterRegistry`.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        clock: Callable[[], float] = time.monotonic,
        disk: DiskPages | None = None,
        kept_adapters: Path | None = None,
    ) -> None:
        self.state = state = SchedulerState.empty(limits, clock, disk)
        self.grammars = GrammarRegistry(limits.num_ranks)
        self.images = ImageRegistry(limits.num_ranks)
        self.adapters = AdapterRegistry(
            limits.adapters, limits.num_adapter_places, limits.num_ranks, kept_adapters
        )
        self._moves = RankAnswers(limits.num_ranks)
        self.recent_facts = RecentFacts()
        """Facts about the last sequences, for explanations of their cache misses."""
        self.admission = Admission(state)
        self.planner = Planner(state, self.admission)
        self.open = OpenSequences(
            state, self.planner, self.admission, self.adapters, (self.grammars, self.images)
        )
        num_tokens = limits.num_pages * limits.page_size
        self.answers = SharedAnswers(state.kv, state.counters, clock, 4 * num_tokens)

    # ------------------------------------------------------------ arrivals and departures

    @property
    def num_in_flight(self) -> int:
        return len(self.state.in_flight)

    @property
    def seconds_in_flight(self) -> float:
        """Forecast time of the steps in flight."""
        return sum(map(self.state.times.seconds, self.state.in_flight.shapes()))

    @property
    def num_running(self) -> int:
        return self.state.slots.num_used

    def add(self, request: SequenceRequest) -> SequenceRefused | None:
        """Queue a sequence, or return the reason for its refusal."""
        num_prompt = num_ids(request.token_ids) - request.num_output
        max_tokens = num_prompt + (request.sampling.max_tokens or 0)
        limits = self.state.limits
        if max_tokens > min(limits.context_length, limits.num_pages * limits.page_size):
            return SequenceRefused(
                request.seq_id, f"{max_tokens} tokens do not fit this engine.", 400
            )
        num_before, key = request.num_output, answer_key(request)
        if key is not None:
            if self.answers.serve(request, key):
                self.open.pass_by(request)
                return None
            request = self.answers.resumed(request, key)
        sequence = self.open.accept(request)
        if isinstance(sequence, SequenceRefused):
            return sequence
        if key is not None:
            self.answers.begin(sequence, key, num_before)
        self.open.queue(sequence)
        return None

    def loaded(self, message: GrammarLoaded | ImageLoaded) -> list[SequenceRefused]:
        """Queue the sequences that have waited for a grammar or an image, or refuse them."""
        registry = self.images if isinstance(message, ImageLoaded) else self.grammars
        return self._all_refused(self.open.loaded(registry, message))

    def refuse_overdue(self) -> list[SequenceRefused]:
        """Drop the sequences that have waited for --max-queue-seconds, with their groups."""
        return self._all_refused(self.open.end_overdue())

    def _all_refused(self, refused: list[SequenceRefused]) -> list[SequenceRefused]:
        """Refusals of sequences, and of those that share them."""
        return self.answers.copy_to_subscribers(TokenBatch(refused=refused)).refused

    def release(self, seq_ids: Pages, *, complete: bool = False) -> None:
        """Drop sequences whose clients want no more tokens. Unknown ids are ignored.

        Args:
            complete: their answers are complete, because a stop string ended them.
        """
        for seq_id in seq_ids.tolist():
            ends = self.answers.leave(seq_id)
            sequence = None if ends is None else self.open.get(ends)
            if sequence is None:
                continue
            if complete:
                self._count_finish(sequence)
                self.answers.keep(sequence, None)
            else:
                self.state.counters.aborted += 1
            self.open.end(sequence)
            self.answers.end(sequence.seq_id)

    def forget_all(self) -> list[int]:
        """Drop all that a tokenizer process has sent, since it is gone: sequences, grammars and
        leases. Cached KV stays.

        Returns:
            the ids of the sequences
        """
        self.answers.forget_clients()
        seq_ids = self.open.ids()
        self.release(np.array(seq_ids, dtype=np.int32))
        self.grammars.drop_all()
        self.images.drop_all()
        for lease in self.state.kv.leases.all():
            self.state.kv.leases.end(lease)
        self.recent_facts = RecentFacts()
        return seq_ids

    def drop_expired(self, now: float) -> dict[int, AnswerReport]:
        """Drop sequences whose deadline has passed, and end expired leases; ``now`` is Unix time.

        Returns:
            The final reports of these sequences, by their ids.
        """
        self.state.kv.leases.expire()
        dropped: dict[int, AnswerReport] = {}
        while (sequence := self.open.end_expired(now)) is not None:
            self.state.counters.aborted += 1
            dropped[sequence.seq_id] = sequence.end("abort", self.state.clock())
            self.answers.end(sequence.seq_id)
        return dropped

    def flush_cache(self) -> int:
        """Evict all pages that no running sequence uses and no lease holds; returns their
        number."""
        self.answers.flush()
        if self.state.reads is not None:
            self.state.reads.flush()
        return self.state.kv.flush()

    def release_session(self, session: str, root: CacheRoot = BASE_ROOT) -> int:
        """End a session: the KV that it alone has used is evicted first. Returns the number of its
        tokens."""
        return self.state.kv.sessions.release(session, root) * self.state.limits.page_size

    # ------------------------------------------------------------ steps

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to compute until a result or a request
        arrives."""
        plan = self.planner.plan()
        self._note_sent()
        return plan

    def _note_sent(self) -> None:
        """Note which step computes the pages that were recorded."""
        if (record := self.state.kv.record) is not None:
            record.sent(self.state.in_flight.next_id - 1)

    def take_begun(self) -> TokenBatch | None:
        """The progress of the prompts that were admitted since the last call, for clients that want
        to know; None: there are none."""
        begun, self.planner.begun = self.planner.begun, []
        if not begun:
            return None
        batch, now = TokenBatch(), self.state.clock()
        for sequence in begun:
            batch.output_of(sequence.seq_id).progress = sequence.progress(
                sequence.cached_tokens, now
            )
        return self.answers.copy_to_subscribers(batch)

    def absorb(self, result: StepResult) -> TokenBatch:
        """Take the result of the oldest step in flight; ends the sequences whose last tokens are in
        it."""
        step, batch = self.state.in_flight.take(result), TokenBatch()
        self._count_step(result, step)
        _absorb_logprobs(result, step, batch)
        self._absorb_drafts(result, step, batch)
        self._absorb_jumps(result, step)
        self._absorb_deferred(result, step)
        self._absorb_progress(step, batch)
        for row in unpack_ids(result.kept_states).tolist():
            self.state.kv.states.confirm(row, step.step_id)
        for slot, token in zip(
            unpack_ids(result.slots).tolist(), unpack_ids(result.token_ids).tolist(), strict=True
        ):
            sequence = step.sequences[slot]
            if sequence is not None and not self._goes_on(sequence, token, batch):
                step.sequences[slot] = None  # tokens forced beyond the end are dropped
        self._absorb_vectors(result, step, batch)
        self.state.counters.output_tokens += batch.num_tokens
        if (record := self.state.kv.record) is not None:
            record.filled(self.state.slots)
            self._note_sent()
            record.done(step.step_id)
        return self.answers.copy_to_subscribers(batch)

    def _absorb_progress(self, step: StepInFlight, batch: TokenBatch) -> None:
        """Report the prompts that the step has computed more of, where a client wants to know."""
        for slot, processed in step.progress.items():
            if (sequence := step.sequences[slot]) is not None:
                output = batch.output_of(sequence.seq_id)
                output.progress = sequence.progress(processed, self.state.clock())

    def _absorb_vectors(self, result: StepResult, step: StepInFlight, batch: TokenBatch) -> None:
        """End the sequences whose numbers have come; they generate nothing."""
        for vector in result.vectors:
            sequence = step.sequences[vector.slot]
            if sequence is None:
                continue
            if vector.values:
                batch.output_of(sequence.seq_id).vector = vector.values
            self._goes_on(sequence, 0 if vector.values else NO_TOKEN, batch)

    def _goes_on(self, sequence: Sequence, token: int, batch: TokenBatch) -> bool:
        """Append a token to a sequence; False if it was the last, or none could be sampled."""
        if token in _FAILURES:
            batch.refused.append(self._fail(sequence, *_FAILURES[token]))
            return False
        output = batch.outputs.get(sequence.seq_id)
        if output is None:  # not output_of(): three lists a row take a fifth of an absorbed step
            output = SequenceOutput([], None, None, None, _NO_LOGPROBS, _NO_LOGPROBS)
            batch.outputs[sequence.seq_id] = output
        if sequence.first_token is None:
            report = output.started = sequence.start(self.state.clock())
            self._note_facts(sequence, output)
            if not sequence.is_idle:
                self._count_start(sequence, report)
        if sequence.max_output == 0:  # a request for KV, or for numbers
            end: FinishReason = "length" if sequence.options.pool is None else "stop"
            output.finished = self._finish(sequence, end, token)
            return False
        sequence.account.output_tokens += 1
        output.token_ids.append(token)
        reason = sequence.append(token)
        if reason is None:
            return True
        output.finished = self._finish(sequence, reason, token)
        return False

    def _count_start(self, sequence: Sequence, report: AnswerReport) -> None:
        self._learn_wait(sequence, report)
        self.state.counters.disk_tokens += report.disk_tokens
        self.state.counters.cache_write_tokens += report.cache_write_tokens
        sequence.account.cache_write_tokens += report.cache_write_tokens

    def _note_facts(self, sequence: Sequence, output: SequenceOutput) -> None:
        self.recent_facts.keep(sequence.seq_id, sequence.cache_facts)
        if sequence.options.cache_hints.explain:
            output.cache_facts = sequence.cache_facts

    def _learn_wait(self, sequence: Sequence, report: AnswerReport) -> None:
        own_tokens = report.prompt_tokens - report.cached_tokens
        own_s = own_tokens * self.state.times.seconds_per_prompt_token
        self.open.waits.observe(
            sequence.forecast_wait_s, report.queued_s + report.prefill_s - own_s
        )

    def _finish(self, sequence: Sequence, reason: FinishReason, token: int) -> AnswerReport:
        self._count_finish(sequence)
        self.open.end(sequence)
        report = sequence.end(reason, self.state.clock(), token)
        self.answers.keep(sequence, report)
        return report

    def _count_finish(self, sequence: Sequence) -> None:
        self.state.counters.finished += 1
        if sequence.max_output > 0:
            self.state.outputs.observe(sequence.num_output)

    def _count_step(self, result: StepResult, step: StepInFlight) -> None:
        counters = self.state.counters
        counters.steps += 1
        counters.step_seconds.observe(result.step_s)
        counters.forward_seconds += result.forward_s
        if step.is_idle:
            counters.idle_tokens += step.shape.tokens
            counters.idle_seconds += result.step_s
            self.state.idle.took(result.step_s)
        else:
            self.state.idle.keep_quiet()
        beyond = int(unpack_ids(result.jump_tokens).sum()) if result.jump_tokens else 0
        drafted = sum(draft.num_drafted for draft in result.drafts)
        accepted = sum(draft.num_accepted for draft in result.drafts)
        tokens = step.shape.rows + beyond
        deferred = int(self.state.slots.is_deferred.sum())  # computed in the step before
        shape = step.shape._replace(rows=max(0, tokens + drafted - accepted - deferred))
        step_s = result.step_s if shape.rows + shape.tokens else 0.0  # it has only sampled
        self.state.times.observe(shape, step_s, tokens, has_drafts=drafted > 0, scored=step.scored)
        self.open.waits.observe_step(step.shape.rows, result.step_s)
        if step.follows:  # otherwise the worker waited because there was no work
            counters.wait_seconds += result.wait_s

    def _absorb_jumps(self, result: StepResult, step: StepInFlight) -> None:
        """Advance the sequences that got more tokens than planned: forced by a grammar, or drafted
        and accepted."""
        jumped, beyond = unpack_ids(result.jump_slots), unpack_ids(result.jump_tokens)
        for slot, num_tokens in zip(jumped.tolist(), beyond.tolist(), strict=True):
            if step.sequences[slot] is not None:
                self.state.slots.planned[slot] += num_tokens
                self.state.counters.forced_tokens += num_tokens

    def _absorb_drafts(self, result: StepResult, step: StepInFlight, batch: TokenBatch) -> None:
        """Count the drafts of a step, and expect as many accepted tokens in the next."""
        accepted: dict[int, int] = {}
        for draft in result.drafts:
            name, num_accepted = DRAFTERS[draft.drafter], draft.num_accepted
            self.state.counters.drafted_tokens[name] += draft.num_drafted
            self.state.counters.accepted_draft_tokens[name] += num_accepted
            if (sequence := step.sequences[draft.slot]) is not None:
                self.state.counters.forced_tokens -= num_accepted  # they are in jump_tokens too
                sequence.count_draft(name, draft.num_drafted, num_accepted)
                accepted[draft.slot] = accepted.get(draft.slot, 0) + num_accepted
        for slot, num_accepted in accepted.items():
            sequence = step.sequences[slot]
            assert sequence is not None
            self.state.slots.expect_drafts(sequence, num_accepted)
            if sequence.sampling.stop:
                batch.output_of(sequence.seq_id).drafts = sequence.drafts.copy()

    def _absorb_deferred(self, result: StepResult, step: StepInFlight) -> None:
        """Note the sequences that wait for their masks."""
        slots = [
            slot for slot in unpack_ids(result.deferred_slots).tolist() if step.sequences[slot]
        ]
        self.state.slots.defer(np.array(slots, dtype=np.int64))
        self.state.counters.deferred_rows += len(slots)

    def _fail(self, sequence: Sequence, status: int, message: str) -> SequenceRefused:
        """End a sequence that the model cannot continue. Its KV may be the cause, so it is not
        kept."""
        self.state.counters.aborted += 1
        self.open.end(sequence, keep_kv=False)
        return SequenceRefused(sequence.seq_id, message, status)

    # ------------------------------------------------------------ orders for the workers

    def take_orders(self) -> list[WorkerOrder]:
        """Orders for every worker, in this order, before any plan made from now on."""
        return [
            *self.adapters.take_orders(),
            *self.grammars.take_orders(),
            *self.images.take_orders(),
        ]

    # ------------------------------------------------------------ pages on disk

    def take_moves(self) -> list[PageMove]:
        """Orders for every worker, in this order, before the plan that was made last."""
        disk, reads = self.state.kv.disk, self.state.reads
        if disk is None or reads is None:
            return []
        orders: list[PageMove] = list(iter(disk.take_order, None))
        return orders + reads.take_orders()

    def moved(self, message: PagesWritten | PagesRead) -> None:
        """Take a rank's answer to an order of :meth:`take_moves`."""
        disk, reads = self.state.kv.disk, self.state.reads
        assert disk is not None and reads is not None
        if (answer := self._moves.add(message)) is None:
            return
        if isinstance(answer, PagesWritten):
            disk.written(answer)
            return
        for sequence in reads.read(answer):
            self.state.waiting.add(sequence, retracted=True)

    # ------------------------------------------------------------ inspection

    def tenant_stats(self, tenant: Tenant) -> TenantStats:
        """The counters of one tenant, and its leases."""
        account, leases = self.state.waiting.accounts.for_tenant(tenant), self.state.kv.leases
        return TenantStats(
            page_size=self.state.limits.page_size,
            prompt_tokens=account.prompt_tokens,
            cached_tokens=account.cached_tokens,
            cache_write_tokens=account.cache_write_tokens,
            output_tokens=account.output_tokens,
            hit_rate=account.cached_tokens / max(1, account.prompt_tokens),
            leases=sum(lease.tenant == tenant.name for lease in leases.all()),
            pinned_tokens=leases.pages_of(tenant.cache_namespace) * self.state.limits.page_size,
        )

    def stats(self, malformed_frames: int = 0) -> SchedulerStats:
        """A snapshot of all counters and gauges."""
        kv, tree = self.state.kv, self.state.kv.tree
        free, total = kv.allocator.num_free, kv.allocator.num_pages
        reads = self.state.reads
        on_disk: dict[str, Any] = (
            {} if kv.disk is None or reads is None else kv.disk.stats() | reads.stats()
        )
        return SchedulerStats(
            **on_disk,
            **msgspec.structs.asdict(self.state.counters),
            running=self.num_running,
            waiting=len(self.state.waiting) + (0 if reads is None else reads.num_waiting),
            evicted_pages=kv.evicted_pages,
            pages_total=total,
            pages_owned=total - free - tree.num_pages,
            pages_cached=tree.num_pages,
            pages_evictable=tree.num_evictable_pages,
            pages_free=free,
            pages_pinned=tree.num_pinned_pages,
            leases=len(kv.leases),
            leases_broken=kv.leases.broken,
            sessions=len(kv.sessions),
            kept_states=len(kv.states),
            kept_state_bytes=len(kv.states) * self.state.limits.state_bytes,
            grammars=len(self.grammars),
            images=len(self.images),
            images_computed=self.images.num_loaded,
            tree_nodes=tree.num_nodes,
            malformed_frames=malformed_frames,
        )


def _absorb_logprobs(result: StepResult, step: StepInFlight, batch: TokenBatch) -> None:
    """Take the log-probabilities that somebody wants and has not got yet."""
    for row in result.prompt_logprobs:
        sequence = step.sequences[row.slot]
        if sequence is not None and sequence.wants_prompt_logprob():
            found = PositionLogprobs(row.token_ids, row.logprobs)
            batch.output_of(sequence.seq_id).prompt_logprobs.append(found)
    for row in result.logprobs:
        if (sequence := step.sequences[row.slot]) is not None:
            found = PositionLogprobs(row.token_ids, row.logprobs, row.log_kept_mass)
            batch.output_of(sequence.seq_id).logprobs.append(found)
