"""Plans the next step of the worker.

Decoding sequences come first, one token each; then prompts that are partly computed; then waiting sequences, as far as
the budget of prompt tokens and the free pages allow. If a decoding sequence lacks a page, another one is retracted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.ids import pack_ids
from radixrt.messages.stats import Counters
from radixrt.messages.steps import Admit, BlockTable, Prefill, StepPlan
from radixrt.scheduler.limits import SchedulerLimits
from radixrt.scheduler.queue.accounts import Account
from radixrt.scheduler.queue.admission import Admission
from radixrt.scheduler.queue.retraction import choose_victim
from radixrt.scheduler.queue.waiting_queue import WaitingQueue
from radixrt.scheduler.radix.kv_cache import KVCache
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.radix.tree import Match
from radixrt.scheduler.sequence import Sequence
from radixrt.scheduler.slot_table import SlotTable
from radixrt.scheduler.steps_in_flight import StepsInFlight


@dataclass(slots=True)
class PlanDraft:
    """A step plan in the making; see :class:`radixrt.messages.steps.StepPlan` for the fields."""

    prefill_budget: int
    num_decoding: int = 0
    admit: list[Admit] = field(default_factory=list)
    block_tables: list[BlockTable] = field(default_factory=list)
    extend_slots: list[NDArray[np.signedinteger]] = field(default_factory=list)
    extend_pages: list[Pages] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)

    def extend(self, slots: NDArray[np.signedinteger], pages: Pages) -> None:
        if len(pages):
            self.extend_slots.append(slots)
            self.extend_pages.append(pages)

    @property
    def has_work(self) -> bool:
        return self.num_decoding > 0 or bool(self.prefill)

    def seal(self, step_id: int, release: list[int]) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step_id=step_id,
            release=release,
            admit=self.admit,
            block_tables=self.block_tables,
            extend_slots=_pack_all(self.extend_slots),
            extend_pages=_pack_all(self.extend_pages),
            prefill=self.prefill,
        )


class Planner:
    """Admits sequences, plans their prefill and decode steps, and retracts them when pages run out."""

    def __init__(
        self,
        limits: SchedulerLimits,
        slots: SlotTable,
        kv: KVCache,
        waiting: WaitingQueue,
        in_flight: StepsInFlight,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.admission = Admission(slots, kv, limits.context_length)
        self._limits = limits
        self._slots = slots
        self._kv = kv
        self._waiting = waiting
        self._in_flight = in_flight
        self._counters = counters
        self._clock = clock
        self._prefilling: dict[int, Sequence] = {}
        """By sequence id: sequences in slots whose prompts are not completely planned."""
        self._adopters: set[int] = set()
        """Slots whose block table has changed since it was last sent to the worker."""
        self._slots_to_release: list[int] = []

    def plan(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute until a result or a request arrives."""
        self._kv.leases.expire()
        self._serve_the_unserved()
        while True:
            draft = PlanDraft(prefill_budget=self._limits.max_prefill_tokens)
            self._plan_decode(draft)
            self._continue_prefills(draft)
            self._admit_waiting(draft)
            if draft.has_work or self._only_waits():
                return self._seal(draft)
            if not self._is_stuck():
                return None
            self._free_pages()

    def _only_waits(self) -> bool:
        """Sequences wait for their last tokens, which are held back, and no step is in flight that could bring them."""
        return not self._in_flight and bool(self._slots.is_held.any())

    def _serve_the_unserved(self) -> None:
        """Retract sequences of the tenant with the most, for a tenant whose turn it is and that runs none: otherwise it would
        wait until an answer of another tenant ends. A tenant with one sequence keeps it."""
        while (account := self._waiting.unserved()) is not None and not self._may_wait(account):
            richest = self._waiting.accounts.richest()
            if richest.running < 2 or not self._retract(richest):
                return

    def _may_wait(self, account: Account) -> bool:
        """Whether the head of the queue can be admitted, or is larger than its tenant's share of the pool."""
        sequence, match = self._waiting.head()
        share = self._waiting.accounts.share_of(account)
        if self._kv.pages_for(sequence.num_tokens) > share * self._limits.num_pages:
            return True
        self.admission.begin_step()
        return self._slots.num_free > 0 and self.admission.has_room_for(sequence, match)

    def _is_stuck(self) -> bool:
        """Partly computed prompts hold all pages, and no step is in flight that could free one."""
        return not self._in_flight and bool(self._prefilling)

    def _plan_decode(self, draft: PlanDraft) -> None:
        slots = self._slots
        self._slots_to_release += slots.retire_exhausted()
        while True:
            decoding = np.flatnonzero(slots.is_decoding)
            missing = slots.pages_missing(decoding)
            if missing.sum() <= self._kv.num_available:
                break
            self._free_pages()
        ahead = np.maximum(missing, slots.pages_ahead(decoding))
        affordable = ahead.sum() <= self._kv.num_available
        draft.extend(*self._kv.grow_each(decoding, ahead if affordable else missing))
        slots.planned[decoding] += 1
        draft.num_decoding = len(decoding)

    def _continue_prefills(self, draft: PlanDraft) -> None:
        for sequence in list(self._prefilling.values()):
            if draft.prefill_budget <= 0:
                return
            if self._kv.adopt_longer_prefix(sequence):
                self._adopters.add(sequence.slot)
                self._count_cached(sequence)
            self._plan_chunk(sequence, draft)

    def _admit_waiting(self, draft: PlanDraft) -> None:
        self._waiting.refresh()
        self.admission.begin_step()
        while draft.prefill_budget > 0 and len(self._waiting) and self._slots.num_free:
            sequence, match = self._waiting.head()
            if self._slots.num_used == 0:
                self._kv.break_leases_for(sequence, match)
            if not self.admission.has_room_for(sequence, match):
                return
            self._waiting.pop(sequence)
            self._admit(sequence, match, draft)
            self.admission.admitted()
            self._plan_chunk(sequence, draft)
            assert draft.prefill and draft.prefill[-1].slot == sequence.slot, (
                "admitted without a page for its prompt"
            )

    def _admit(self, sequence: Sequence, match: Match | None, draft: PlanDraft) -> None:
        self._kv.enter(sequence, match)
        slot = sequence.slot
        self._prefilling[sequence.seq_id] = sequence
        sequence.account.running += 1
        if sequence.first_planned is None:
            sequence.first_planned = self._clock()
            self._counters.prompt_tokens += sequence.num_tokens
            sequence.account.prompt_tokens += sequence.num_tokens
        self._count_cached(sequence)
        draft.admit.append(
            Admit(
                slot=slot,
                token_ids=pack_ids(sequence.known_tokens()),
                num_cached=int(self._slots.planned[slot]),
                pages=pack_ids(self._slots.block_table(slot)),
                sampling=sequence.sampling,
                num_output=sequence.num_output,
                grammar=sequence.grammar,
            )
        )

    def _count_cached(self, sequence: Sequence) -> None:
        """Count the tokens that a sequence found in the tree. Tokens planned before a retraction are not counted again."""
        found = int(self._slots.planned[sequence.slot])
        gain = found - sequence.num_reached
        if gain <= 0:
            return
        sequence.num_reached = found
        if sequence.first_token is None:
            sequence.cached_tokens += gain
            sequence.account.cached_tokens += gain
            self._counters.cached_tokens += gain

    def _plan_chunk(self, sequence: Sequence, draft: PlanDraft) -> None:
        """Plan the next chunk of a prompt, as large as budget and pages allow."""
        slots, slot = self._slots, sequence.slot
        start = int(slots.planned[slot])
        end = min(
            sequence.num_tokens,
            start + self._limits.settings.chunked_prefill_size,
            start + draft.prefill_budget,
        )
        pages = self._kv.grow(sequence, end)
        end = min(end, int(slots.num_pages[slot]) * slots.page_size)
        if end <= start:
            return
        if slot in self._adopters:
            self._adopters.remove(slot)
            draft.block_tables.append(BlockTable(slot, pack_ids(slots.block_table(slot))))
        else:
            draft.extend(np.full(len(pages), slot, dtype=np.int32), pages)
        draft.prefill.append(Prefill(slot, start, end - start))
        draft.prefill_budget -= end - start
        slots.planned[slot] = end
        sequence.num_reached = max(sequence.num_reached, end)
        self._kv.publish_prefill(sequence)
        if end == sequence.num_tokens:
            del self._prefilling[sequence.seq_id]
            slots.is_decoding[slot] = True

    def _seal(self, draft: PlanDraft) -> StepPlan:
        released, self._slots_to_release = self._slots_to_release, []
        return draft.seal(self._in_flight.send(self._slots.sequences), released)

    def _free_pages(self) -> None:
        """Retract a sequence; if only one runs, break a lease instead.

        So leases reduce the number of sequences that run at once, but never stop all work.
        """
        if self._slots.num_used > 1 or not self._kv.leases.break_first():
            self._retract()

    def _retract(self, account: Account | None = None) -> bool:
        """Move a sequence back to the queue. Its KV stays in the tree until it is evicted. Its tokens in flight are
        dropped; the sampler draws the same ones again.

        Args:
            account: of the tenant whose sequence it has to be; None: any.

        Returns:
            False if all sequences of this tenant are about to end.
        """
        growing = [
            sequence
            for sequence in self._slots.running()
            if (self._slots.is_decoding[sequence.slot] or sequence.seq_id in self._prefilling)
            and account in (None, sequence.account)
        ]
        if not growing:
            return False
        sequence = choose_victim(growing, self._waiting.order)
        sequence.begin_prompt_again()
        self.leave(sequence, ended=False)
        self._waiting.add(sequence, retracted=True)
        self._counters.retractions += 1
        return True

    def leave(self, sequence: Sequence, *, keep_kv: bool = True, ended: bool = True) -> None:
        """Take a running sequence out of its slot; the next plan tells the worker.

        Args:
            keep_kv: its full pages stay in the tree.
            ended: it is not retracted.
        """
        slot = sequence.slot
        if self._slots.in_worker[slot]:
            self._slots_to_release.append(slot)
        sequence.account.running -= 1
        self._in_flight.forget(sequence)
        self._prefilling.pop(sequence.seq_id, None)
        self._adopters.discard(slot)
        if keep_kv:
            self._kv.leave(sequence, ended=ended)
        else:
            self._kv.discard(sequence)


def _pack_all(parts: list[NDArray[np.signedinteger]]) -> bytes:
    return pack_ids(np.concatenate(parts)) if parts else b""
