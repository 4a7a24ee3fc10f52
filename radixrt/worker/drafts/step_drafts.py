"""The drafts of steps: which slots get some at which price, what became of them, and what their
times teach."""

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from radixrt.attention.auxiliary import AuxiliaryStates
from radixrt.messages.ids import TokenIds
from radixrt.messages.steps import Admit, StepPlan, VerifiedDraft
from radixrt.worker.batch import PersistentBatch, StepInputs
from radixrt.worker.drafts.head import HeadDrafter
from radixrt.worker.drafts.price import NEVER, DraftPrice, HeadTrials
from radixrt.worker.drafts.speculator import Speculator
from radixrt.worker.kv.pool import KVPool
from radixrt.worker.kv.states import SlotStates
from radixrt.worker.launched_step import LaunchedStep
from radixrt.worker.runner_parts import RunnerParts
from radixrt.worker.sampling.matchers import SlotMatchers


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a step."""

    tokens: dict[int, TokenIds] = field(default_factory=dict)
    """By slot."""
    seconds: float = 0.0
    """Time that drafting took; 0: nothing could pay."""
    head_s: float = 0.0
    """The part of it that the head took."""


class StepDrafts:
    """Drafts tokens for the rows of each step, and verifies them."""

    def __init__(
        self,
        parts: RunnerParts,
        pool: KVPool,
        batch: PersistentBatch,
        states: SlotStates | None,
        matchers: SlotMatchers,
        *,
        overlaps: bool,
    ) -> None:
        """
        Args:
            overlaps: whether steps overlap, so that nothing can be drafted.
        """
        self._batch = batch
        self._states = states
        self._overlaps = overlaps
        self._tp = parts.tp
        self._head = parts.head_drafter(pool, batch)
        self.auxiliary: AuxiliaryStates | None = parts.auxiliary_states()
        """Takes the states that the head reads between the layers."""
        self._speculator = Speculator(
            parts.eos_token_ids,
            matchers.forced,
            matchers.allowed,
            self._head,
            from_text=parts.config.speculation != "head",
        )
        self.price = DraftPrice()
        self._head_trials = HeadTrials()

    # ------------------------------------------------------------ slots

    def admit(self, admit: Admit) -> None:
        """Follow a sequence."""
        if self._head is not None:
            self._head.follow(admit)
        if self._overlaps:
            return
        self._speculator.admit(admit)
        if admit.drafts is not None and (admit.drafts.continuation or admit.drafts.prediction):
            self.price.retry_soon()

    def before_release(self, slots: list[int]) -> None:
        """Complete the head's part of the pages of sequences that leave: these stay in the tree."""
        if self._head is not None:
            self._head.catch_up(slots)

    def release(self, slot: int) -> None:
        """Forget a sequence."""
        self._speculator.release(slot)
        if self._head is not None:
            self._head.release(slot)

    def defer(self, slots: list[int]) -> None:
        """The masks of some slots were not ready."""
        self._speculator.defer(slots)

    def extend(self, slots: NDArray[np.int64], token_ids: TokenIds) -> None:
        """Append the new tokens [n] of some slots."""
        self._speculator.extend(slots, token_ids)
        if self._head is not None:
            self._head.extend(slots, token_ids)

    def take_states(self, hidden: torch.Tensor, inputs: StepInputs, num_prompts: int) -> None:
        """Let the head have the states of a step.

        Args:
            hidden: [num_tokens, hidden_size], which it reads if it reads none between the layers.
        """
        if self._head is not None:
            states = hidden if self.auxiliary is None else self.auxiliary.rows
            self._head.take_states(states, inputs, num_prompts, self._batch.computed)

    # ------------------------------------------------------------ drafts

    def propose(self, plan: StepPlan, decoding: NDArray[np.int64]) -> Drafted:
        """Draft tokens for the next step.

        Args:
            decoding: [n] slots.
        """
        slots = self._speculator.slots_of(decoding)
        if not slots:
            return Drafted()
        if plan.prefill:
            price = self.price.beside_prompts(len(decoding), plan.draft_saving)
        else:
            price = self.price.next(len(decoding))
        price = float(self._tp.from_first(np.array([price]))[0])  # the ranks' times differ
        if price >= NEVER:
            return Drafted()
        begun = time.perf_counter()
        head_s = 0.0 if self._head is None else self._draft_by_head(self._head, slots, price)
        drafts: dict[int, TokenIds] = {}
        for slot in slots:
            room = self._batch.room_for_drafts(slot)
            if self._states is not None:
                room = min(room, self._states.room_for_drafts())
            if tokens := self._speculator.propose(slot, room, price):
                drafts[slot] = np.array(tokens, dtype=np.int32)
                self._batch.draft(slot, self._speculator.last_token(slot), drafts[slot])
                if self._states is not None:
                    self._states.draft(len(tokens))
        return Drafted(drafts, time.perf_counter() - begun, head_s)

    def _draft_by_head(self, head: HeadDrafter, slots: list[int], price: float) -> float:
        """Let the head draft for those of some slots where that pays; returns the seconds that it
        took."""
        cost = self.price.of_head(len(slots))
        rooms = {slot: self._batch.room_for_drafts(slot) for slot in slots}
        lengths = {
            slot: self._speculator.length_for_head(slot, room, price, cost)
            for slot, room in rooms.items()
        }
        wanted = {slot: min(2 * n, rooms[slot]) for slot, n in lengths.items() if n}
        longest = self._speculator.longest_by_head(price + cost)
        if self._head_trials.is_due(drafts=bool(wanted)):
            wanted = {slot: 1 for slot, room in rooms.items() if room > 0}
        begun, before = time.perf_counter(), head.computed
        head.draft(wanted, price + cost, longest)
        seconds = time.perf_counter() - begun if wanted else 0.0
        self.price.observe_head(head.computed - before, seconds)
        return seconds

    def verify(
        self, drafts: dict[int, TokenIds], slots: NDArray[np.int64], kept_states: list[int]
    ) -> list[VerifiedDraft]:
        """Give back the positions of drafts that were not drawn.

        Args:
            slots: [rows] of the tokens that were sampled; a slot that is not among them is
                deferred.
            kept_states: of this step; those behind accepted drafts are added.
        """
        if not drafts:
            return []
        counts = np.bincount(slots, minlength=max(drafts) + 1)
        verified: list[VerifiedDraft] = []
        for slot, tokens in drafts.items():
            num_accepted = max(0, int(counts[slot]) - 1)
            num_rejected = len(tokens) - num_accepted
            self._batch.reject(slot, num_rejected)
            if self._states is not None:
                kept_states += self._states.verified(slot, num_rejected)
            if counts[slot]:
                verified += self._speculator.verified(slot, len(tokens), num_accepted)
        return verified

    def learn(self, step: LaunchedStep, seconds: float) -> None:
        """Learn what the drafts of a step cost and saved, from its time."""
        if self._overlaps:
            return
        drafted = sum(draft.num_drafted for draft in step.drafts)
        accepted = sum(draft.num_accepted for draft in step.drafts)
        if step.prompt_tokens:
            if not step.prompt_logprobs:
                tokens = step.prompt_tokens
                self.price.observe_prompts(step.decoding, drafted, tokens, seconds)
            return
        has_forced = sum(step.advanced.values()) > accepted  # their rows cost less
        known_s = 0.0 if has_forced else seconds
        tokens = step.decoding + accepted
        self.price.observe(step.decoding, drafted, tokens, known_s, step.draft_s, step.head_s)
