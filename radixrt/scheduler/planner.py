"""Plans the next step of the worker.

Decoding sequences come first, one token each. Prompts share the rest of the step: a number of
tokens, and a time (:mod:`radixrt.scheduler.step_times`). If a decoding sequence lacks a page,
another one is retracted.

A long prompt must not delay the short ones behind it, nor they delay it for ever. Of the budget for
prompts, while others compete for it:

- The oldest partly computed prompt gets a quarter. So a prompt of n tokens is computed after at
  most 4n / budget steps as the oldest.
- Waiting sequences are admitted with up to half, in the order of the queue; beside four partly
  computed prompts, only those shorter than the rest of each. The others wait, because more prompts
  at a time end no earlier. A prompt that exceeds what is left of this half gets only half of it, so
  that those behind it are admitted too.
- The rest goes to the partly computed prompts in the order of their remaining tokens, the shortest
  first.

Of the partly computed prompts, those of the tenant with the fewest running sequences for its weight
come first.
"""

import numpy as np

from radixrt.messages.ids import num_ids, pack_ids
from radixrt.messages.steps import FULL_SAVING, Admit, BlockTable, Prefill, StepPlan
from radixrt.scheduler.idle_work import IDLE_STEP_S
from radixrt.scheduler.plan_builder import Budget, PlanBuilder
from radixrt.scheduler.queue.accounts import Account
from radixrt.scheduler.queue.admission import Admission
from radixrt.scheduler.queue.waiting_queue import choose_victim
from radixrt.scheduler.radix.node import Match
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.state import SchedulerState
from radixrt.scheduler.step_times import NO_BOUND, StepShape

OLDEST_SHARE = 0.25
"""Part of the budget for prompts that the oldest partly computed one gets."""

MAX_PARTIAL = 4
"""Partly computed prompts beside which a waiting one is admitted only if it is shorter than the
rest of each."""

NEWCOMERS_SHARE = 0.5
"""Part of the budget for prompts that the first chunks of waiting sequences get beside partly
computed ones."""

NO_ROWS = StepShape(0, 0)

MIN_CHUNK = 16
"""A chunk is not smaller than this for lack of time if it is the only or the first one."""


class Planner:
    """Admits sequences, plans their prefill and decode steps, and retracts them when pages run
    out."""

    def __init__(self, state: SchedulerState, admission: Admission) -> None:
        self._state = state
        self._admission = admission
        self._prefilling: dict[int, Sequence] = {}
        """Sequences in slots whose prompts are not completely planned, by sequence id."""
        self._adopters: dict[int, int] = {}
        """Slots whose block table has changed since it was last sent to the worker, with the state
        from which they go on."""
        self._slots_to_release: list[int] = []
        self.begun: list[Sequence] = []
        """Sequences just admitted whose clients want to know of it."""

    def plan(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute until a result or a request
        arrives."""
        self._state.kv.leases.expire()
        in_flight = self._state.in_flight
        self._state.kv.begin_plan(in_flight.next_id, len(in_flight))
        if (ahead := self._state.idle.running) is not None:
            is_alone = not len(self._state.waiting) and self._state.slots.num_used == 1
            if is_alone and not self._state.idle.must_yield(ahead):
                return self._continue_idle(ahead)
            self._set_aside(ahead)
        self._preempt_for_starved_tenant()
        while True:
            builder = PlanBuilder()
            self._plan_decode(builder)
            self._plan_prefill(builder)
            if builder.has_work:
                return self._seal(builder)
            if self._state.in_flight:
                return None
            if self._state.slots.is_deferred.any():  # only a step brings these last tokens
                return self._seal(builder)
            if not self._prefilling:
                return self._begin_idle(builder)
            self._free_pages()  # partly computed prompts hold all pages

    # ------------------------------------------------------------ work for idle times

    def _begin_idle(self, builder: PlanBuilder) -> StepPlan | None:
        """Compute ahead, where nothing waits or runs."""
        idle = self._state.idle
        if (sequence := idle.next()) is None or self._state.slots.num_used:
            return None
        match = self._state.kv.find_prefix(sequence)
        cached = 0 if match is None else match.num_pages
        available = self._state.kv.num_available - self._state.kv.num_pages_locked_by(match)
        if self._state.kv.pages_for(sequence.num_tokens) - cached > available:
            return None  # leases hold the pages
        idle.remove(sequence.seq_id)
        sequence.account = self._state.waiting.accounts.for_tenant(sequence.options.tenant)
        self._admit(sequence, match, builder)
        idle.running = sequence
        return self._plan_idle(sequence, builder)

    def _continue_idle(self, sequence: Sequence) -> StepPlan | None:
        if self._state.in_flight or self._state.idle.rests(sequence):
            return None
        return self._plan_idle(sequence, PlanBuilder())

    def _plan_idle(self, sequence: Sequence, builder: PlanBuilder) -> StepPlan:
        times, most = self._state.times, self._state.limits.max_prefill_tokens
        seconds = min(IDLE_STEP_S, times.max_step_s(NO_ROWS))
        budget = Budget(min(most, times.most_prefill_tokens()), seconds)
        tokens = self._chunk_within(sequence, builder, budget)
        self._plan_chunk(sequence, builder, max(tokens, 1), budget)
        if sequence.seq_id not in self._prefilling:
            self._state.idle.left(sequence)
        return self._seal(builder, is_idle=True)

    def _set_aside(self, sequence: Sequence) -> None:
        """Something else has come: the idle sequence goes on later, from the tree."""
        sequence.begin_prompt_again()
        self.leave(sequence, ended=False)
        self._state.idle.add(sequence, first=True)

    # ------------------------------------------------------------ one step

    def _preempt_for_starved_tenant(self) -> None:
        """Retract sequences of the tenant with the most, for a tenant whose turn it is and that
        runs none: otherwise it would wait until an answer of another tenant ends. A tenant with one
        sequence keeps it."""
        waiting = self._state.waiting
        while (account := waiting.unserved()) is not None and not self._may_wait(account):
            largest = waiting.accounts.largest_share()
            if largest.running < 2 or not self._retract(largest):
                return

    def _may_wait(self, account: Account) -> bool:
        """Whether the head of the queue can be admitted, or is larger than its tenant's share of
        the pool."""
        sequence, match = self._state.waiting.head()
        share = self._state.waiting.accounts.share_of(account)
        if self._state.kv.pages_for(sequence.num_tokens) > share * self._state.limits.num_pages:
            return True
        self._admission.begin_step()
        return self._state.slots.num_free > 0 and self._admission.has_room_for(sequence, match)

    def _plan_decode(self, builder: PlanBuilder) -> None:
        slots = self._state.slots
        self._slots_to_release += slots.retire_exhausted()
        while True:
            decoding = np.flatnonzero(slots.is_decoding)
            missing = slots.pages_missing(decoding)
            if missing.sum() <= self._state.kv.num_available:
                break
            self._free_pages()
        ahead = np.maximum(missing, slots.pages_ahead(decoding))
        affordable = ahead.sum() <= self._state.kv.num_available
        builder.extend(*self._state.kv.grow_each(decoding, ahead if affordable else missing))
        positions = slots.planned[decoding] + 1
        slots.planned[decoding] = positions
        builder.keep += self._state.kv.state_orders.of_answers(decoding)
        builder.shape = StepShape(rows=len(decoding), context=int(positions.sum()))

    def _plan_prefill(self, builder: PlanBuilder) -> None:
        self._state.waiting.refresh()
        self._admission.begin_step()
        self._admission.full_at = None
        if not self._prefilling and not len(self._state.waiting):
            return
        budget = Budget(
            min(self._state.limits.max_prefill_tokens, self._state.times.most_prefill_tokens()),
            self._state.times.prefill_seconds(builder.shape),
        )
        oldest, newcomers = budget.part(OLDEST_SHARE), budget.part(NEWCOMERS_SHARE)
        if len(self._prefilling) > 1 or (self._prefilling and len(self._state.waiting)):
            first = min(self._prefilling.values(), key=self._state.waiting.order.rank)
            self._continue(first, builder, oldest)
        self._admit_waiting(builder, newcomers if self._prefilling else budget)
        for sequence in self._shortest_first():
            if budget.is_spent:
                break
            self._continue(sequence, builder, budget)
        self._admit_waiting(builder, budget, beside_partial=NO_BOUND)  # the others leave it over
        if len(self._state.waiting) and not self._state.slots.num_free:
            self._admission.note_full()

    def _shortest_first(self) -> list[Sequence]:
        """The partly computed prompts; those of the tenant with the fewest running sequences for
        its weight come first."""
        rank = self._state.waiting.order.rank

        def place(sequence: Sequence) -> tuple[int, float, int]:
            account = sequence.account
            return rank(sequence), account.running / account.weight, self._rest(sequence)

        return sorted(self._prefilling.values(), key=place)

    def _rest(self, sequence: Sequence) -> int:
        """Tokens of a prompt that are not planned yet."""
        return sequence.num_tokens - int(self._state.slots.planned[sequence.slot])

    def _continue(self, sequence: Sequence, builder: PlanBuilder, budget: Budget) -> None:
        """Plan a chunk of a partly computed prompt, behind all that the tree has of it by now."""
        if sequence.slot in builder.chunks:
            if self._state.kv.has_longer_prefix(sequence):
                return  # it is adopted in the next step, because a step has one chunk of each sequence
        elif (state := self._state.kv.adopt_longer_prefix(sequence)) is not None:
            self._adopters[sequence.slot] = state
            self._count_cached(sequence)
        elif self._state.kv.is_better_state_coming(sequence):
            return
        tokens = self._chunk_within(sequence, builder, budget)
        self._plan_chunk(sequence, builder, tokens, budget)

    def _admit_waiting(
        self, builder: PlanBuilder, budget: Budget, beside_partial: int = MAX_PARTIAL
    ) -> None:
        """Admit waiting sequences, as far as slots, pages and the budget for their first chunks
        suffice."""
        waiting, slots = self._state.waiting, self._state.slots
        while len(waiting) and slots.num_free and not self._admission.is_full:
            if budget.is_spent:
                return
            is_crowded = len(self._prefilling) >= beside_partial
            sequence, match = waiting.shortest() if is_crowded else waiting.head()
            reads = self._state.reads
            if slots.num_used == 0:
                if reads is not None and reads.must_wait(sequence, match):
                    return
                self._state.kv.break_leases_for(sequence, match)
            if self._state.kv.is_state_coming(match):
                return  # this step computes more of its prompt
            start = self._state.kv.usable_tokens(match)
            to_compute = sequence.num_tokens - start
            if is_crowded and to_compute >= min(map(self._rest, self._prefilling.values())):
                return
            least = self._least_chunk(to_compute)
            if builder.prefill and self._tokens_within(budget, start, sequence) < least:
                return
            if not self._admission.has_room_for(sequence, match):
                self._admission.note_full()
                return
            if reads is not None and reads.begins(sequence, match):
                waiting.remove(sequence.seq_id)  # it comes back with its pages
                continue
            waiting.pop(sequence)
            self._admit(sequence, match, builder)
            self._admission.admitted()
            self._plan_first_chunk(sequence, builder, budget)

    def _least_chunk(self, to_compute: int, most: int = NO_BOUND) -> int:
        """Tokens of the first chunk of a prompt at least, given those that it lacks."""
        return to_compute if self._state.limits.whole_prompts else min(MIN_CHUNK, to_compute, most)

    def _plan_first_chunk(self, sequence: Sequence, builder: PlanBuilder, budget: Budget) -> None:
        """Plan the first chunk of a sequence just admitted."""
        tokens = self._chunk_within(sequence, builder, budget)
        if tokens < self._rest(sequence) and len(self._state.waiting):
            tokens = self._chunk_within(sequence, builder, budget.part(0.5))
        least = self._least_chunk(self._rest(sequence), budget.tokens)
        self._plan_chunk(sequence, builder, max(tokens, least), budget)
        assert sequence.slot in builder.chunks, "admitted without a page for its prompt"

    def _admit(self, sequence: Sequence, match: Match | None, builder: PlanBuilder) -> None:
        if sequence.first_planned is None:
            self._state.kv.note_facts(sequence, match)
        drafts = self._state.kv.draft_sources(sequence, match) if sequence.speculates else None
        state = self._state.kv.enter(sequence, match)
        slot = sequence.slot
        if drafts is not None:
            expected = num_ids(drafts.continuation) + num_ids(drafts.prediction)
            self._state.slots.expect_drafts(sequence, expected)
        self._prefilling[sequence.seq_id] = sequence
        sequence.account.running += 1
        sequence.group.has_begun = True
        if sequence.first_planned is None:
            sequence.first_planned = self._state.clock()
            if not sequence.is_idle:
                self._count_prompt(sequence)
        self._count_cached(sequence)
        if sequence.reports_progress:
            self.begun.append(sequence)
        builder.admit.append(
            Admit(
                slot=slot,
                token_ids=pack_ids(sequence.model_tokens()),
                num_cached=int(self._state.slots.planned[slot]),
                pages=pack_ids(self._state.slots.block_table(slot)),
                sampling=sequence.sampling,
                num_output=sequence.num_output,
                grammar=sequence.grammar,
                pool=sequence.options.pool,
                second_segment_start=sequence.second_segment_start,
                drafts=drafts,
                state=state,
                adapter=sequence.adapter,
                adapter_from=sequence.adapter_from,
                images=sequence.images,
            )
        )

    def _count_prompt(self, sequence: Sequence) -> None:
        counters, facts = self._state.counters, sequence.cache_facts
        counters.prompt_tokens += sequence.num_tokens
        counters.stateless_tokens += facts.stateless_tokens
        counters.stateless_hits += facts.stateless_tokens > 0
        sequence.account.prompt_tokens += sequence.num_tokens

    def _count_cached(self, sequence: Sequence) -> None:
        """Count the tokens that a sequence found in the tree. Tokens planned before a retraction
        are not counted again."""
        found = int(self._state.slots.planned[sequence.slot])
        gain = found - sequence.num_reached
        if gain <= 0:
            return
        sequence.num_reached = found
        if sequence.first_token is None:
            sequence.cached_tokens += gain
            if not sequence.is_idle:
                sequence.account.cached_tokens += gain
                self._state.counters.cached_tokens += gain

    def _chunk_within(self, sequence: Sequence, builder: PlanBuilder, budget: Budget) -> int:
        """Tokens of the next chunk of a prompt; it ends with a page of the tree if it does not end
        the prompt."""
        page_size = self._state.slots.page_size
        start = int(self._state.slots.planned[sequence.slot])
        tokens = self._tokens_within(budget, start, sequence)
        if not builder.prefill:
            tokens = max(tokens, min(MIN_CHUNK, budget.tokens))
        to_compute = sequence.num_tokens - start
        if tokens >= to_compute:
            return to_compute
        over = (start + tokens) % page_size
        if over < tokens:
            return tokens - over
        return 0 if builder.prefill else tokens

    def _tokens_within(self, budget: Budget, start: int, sequence: Sequence) -> int:
        """Tokens of a prompt from position ``start`` that the budget pays for."""
        seconds = max(budget.seconds, 0)
        tokens = min(budget.tokens, self._state.times.tokens_within(seconds, start))
        if scored := sequence.num_scored(start, start + tokens):
            before = tokens - scored
            seconds = max(seconds - self._state.times.chunk_seconds(start, before), 0)
            scored = self._state.times.scored_within(seconds, start + before)
            tokens = min(tokens, before + scored)
        return tokens

    def _plan_chunk(
        self, sequence: Sequence, builder: PlanBuilder, tokens: int, budget: Budget
    ) -> None:
        """Plan ``tokens`` more of a prompt, as far as pages and the size of a chunk allow, and take
        them from the budget."""
        slots, slot = self._state.slots, sequence.slot
        start = first = int(slots.planned[slot])
        index = builder.chunks.get(slot)
        if index is not None:
            first = builder.prefill[index].start
        end = min(start + tokens, first + self._state.limits.longest_chunk)
        end = self._beside_images(sequence, start, end)
        pages = self._state.kv.grow(sequence, end)
        if end <= start:
            return
        if slot in self._adopters:
            state = self._adopters.pop(slot)
            builder.block_tables.append(BlockTable(slot, pack_ids(slots.block_table(slot)), state))
        else:
            builder.extend(np.full(len(pages), slot, dtype=np.int32), pages)
        if index is None:
            builder.chunks[slot] = len(builder.prefill)
            builder.prefill.append(Prefill(slot, first, end - first))
        else:
            builder.prefill[index] = Prefill(slot, first, end - first)
        scored = sequence.num_scored(start, end)
        times = self._state.times
        seconds = times.chunk_seconds(start, end - start) + times.scored_seconds(scored)
        budget.spend(end - start, seconds)
        builder.scored += scored
        builder.shape = builder.shape.with_chunk(start, end - start)
        slots.planned[slot] = end
        sequence.num_reached = max(sequence.num_reached, end)
        builder.keep += self._state.kv.state_orders.of_prompt(sequence, start, end)
        self._state.kv.publish_prefill(sequence)
        if sequence.reports_progress:
            builder.progress[slot] = end
        if end == sequence.num_tokens:
            del self._prefilling[sequence.seq_id]
            slots.is_decoding[slot] = True

    def _beside_images(self, sequence: Sequence, start: int, end: int) -> int:
        """The end of a chunk from ``start`` for which there are pages, ``end`` if possible. It
        splits no image that must be computed whole: one at ``start`` belongs to it."""
        slots = self._state.slots
        num_pages = int(slots.num_pages[sequence.slot]) + self._state.kv.num_available
        reach = num_pages * slots.page_size
        end = min(end, reach)
        if (split := sequence.split_image(end)) is None:
            return end
        image_start, image_end = split
        if image_start > start:
            return image_start
        return image_end if image_end <= reach else start

    def _seal(self, builder: PlanBuilder, *, is_idle: bool = False) -> StepPlan:
        released, self._slots_to_release = self._slots_to_release, []
        shape = builder.shape
        sequences = self._state.slots.sequences
        step_id = self._state.in_flight.send(
            sequences, shape, scored=builder.scored, progress=builder.progress, is_idle=is_idle
        )
        return builder.seal(step_id, released, self._draft_saving(shape.tokens))

    def _draft_saving(self, tokens: int) -> float:
        """See :class:`StepPlan`: of the tokens that the running answers will still get, the part
        that comes after all prompts are computed, ``tokens`` of them a step. Prompts that wait for
        an answer to end are left out."""
        if not (tokens and self._state.limits.speculates):
            return FULL_SAVING
        to_come = float(sum(map(self._rest, self._prefilling.values())))
        if not self._admission.is_full:
            to_come += self._state.waiting.prompt_tokens
        longest_rest = 2 * self._state.outputs.mean_rest() if to_come else 0.0
        return max(0.0, 1 - to_come / tokens / longest_rest) if longest_rest else 1.0

    def _free_pages(self) -> None:
        """Retract a sequence; if only one runs, break a lease instead.

        So leases reduce the number of sequences that run at once, but never stop all work.
        """
        if self._state.slots.num_used > 1 or not self._state.kv.leases.revoke_soonest():
            self._retract()

    def _retract(self, account: Account | None = None) -> bool:
        """Move a sequence back to the queue. Its KV stays in the tree until it is evicted. Its
        tokens in flight are dropped; the sampler draws the same ones again.

        Args:
            account: of the tenant whose sequence it has to be; None: any.

        Returns:
            False if all sequences of this tenant are about to end.
        """
        growing = [
            sequence
            for sequence in self._state.slots.running()
            if (self._state.slots.is_decoding[sequence.slot] or sequence.seq_id in self._prefilling)
            and account in (None, sequence.account)
        ]
        if not growing:
            return False
        sequence = choose_victim(growing, self._state.waiting.order)
        sequence.begin_prompt_again()
        self.leave(sequence, ended=False)
        self._state.waiting.add(sequence, retracted=True)
        self._state.counters.retractions += 1
        return True

    def leave(self, sequence: Sequence, *, keep_kv: bool = True, ended: bool = True) -> None:
        """Take a running sequence out of its slot; the next plan tells the worker.

        Args:
            keep_kv: its full pages stay in the tree.
            ended: it is not retracted.
        """
        slot = sequence.slot
        if self._state.slots.in_worker[slot]:
            self._slots_to_release.append(slot)
        sequence.account.running -= 1
        self._state.in_flight.forget(sequence)
        self._prefilling.pop(sequence.seq_id, None)
        self._state.idle.left(sequence)
        self._adopters.pop(slot, None)
        if keep_kv:
            self._state.kv.leave(sequence, ended=ended)
        else:
            self._state.kv.discard(sequence)
