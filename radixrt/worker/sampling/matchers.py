"""Keeps the matcher of each constrained slot, and fills the bitmask of tokens that each may sample
next.

A grammar is loaded once (:mod:`radixrt.worker.sampling.grammar_loader`) and its matcher forked for
every sequence that uses it. The bitmask is filled by threads beside the forward pass; the sampler
applies it. A row whose mask is not ready in time is not sampled in this step. Then the matchers
take the sampled tokens. They can also list the tokens that must follow (jump-forward). Lists of
allowed tokens, forbidden token sequences and the bound of the reasoning restrict the same bitmask.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.bitmask import BitmaskRow, bitmask_words
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import TokenIds
from radixrt.worker.drafts.verification import NO_DRAFT
from radixrt.worker.sampling.grammar_loader import GrammarLoader, LoadedGrammar
from radixrt.worker.sampling.mask_filling import MaskFiller, MaskJob
from radixrt.worker.sampling.restrictions import (
    ALL_TOKENS,
    ReasoningBudget,
    TokenRestriction,
    allow_only,
)
from radixrt.worker.sampling.slot_matcher import ConstraintsAhead, SlotMatcher

MASK_BUDGET_S = 0.002
"""Time that a step's other rows wait for the masks of rows that are usually quick."""
SLOW_MASK_BUDGET_S = 0.0002
"""Time that they wait for the others."""
ALONE_BUDGET_S = 0.02
"""Longest wait of a step that does nothing else; a request that arrives meanwhile waits too."""

NO_DRAFTS: Mapping[int, TokenIds] = {}
NO_ROWS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that the constrained rows of a batch may sample."""

    rows: NDArray[np.int64]  # [n] rows of the batch, ascending
    bits: NDArray[np.int32]  # [n, words], see radixrt.constrained.bitmask
    unfilled: NDArray[np.int64] = field(default_factory=NO_ROWS.copy)
    """Rows behind drafts at which the constraints can't be kept, so that nothing is sampled there:
    [m]."""


class SlotMatchers:
    """The matchers of all slots; owned by the worker."""

    def __init__(
        self,
        loader: GrammarLoader,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int],
        jump_forward: bool = True,
        decide: Callable[[NDArray[np.bool_]], NDArray[np.bool_]] = lambda ready: ready,
    ) -> None:
        """
        Args:
            jump_forward: forced tokens are not sampled.
            decide: from the rows [n] whose masks are ready on this rank to those on which all ranks
                agree.
        """
        self.loader = loader
        self._num_words = bitmask_words(vocab_size)
        self._eos_token_ids = list(eos_token_ids)
        self._jump_forward = jump_forward
        self._decide = decide
        self._filler = MaskFiller()
        self._by_slot: dict[int, SlotMatcher] = {}
        self._grammars: dict[int, LoadedGrammar] = {}
        """The grammars of these matchers."""
        self._restrictions: dict[int, TokenRestriction] = {}
        """The restrictions of requests with ``allowed_token_ids`` or ``bad_words``, by slot."""
        self._budgets: dict[int, ReasoningBudget] = {}
        """The budgets of reasonings that have not ended and are bounded, by slot."""

    def admit(self, slot: int, use: GrammarUse, output: TokenIds, *, may_jump: bool) -> None:
        """Hold the sequence of a slot to a grammar.

        Args:
            use: which grammar, and from where on.
            output: the tokens generated before a retraction; the matcher takes them again.
            may_jump: forced tokens may be given without being sampled.
        """
        grammar = self._grammars[slot] = self.loader.use(use.key)
        self._by_slot[slot] = SlotMatcher(
            grammar.matcher.fork(),
            use,
            output,
            tag_masks=self.loader.tag_masks,
            eos_token_ids=self._eos_token_ids,
            num_words=self._num_words,
            may_jump=may_jump,
        )

    def restrict(self, slot: int, sampling: SamplingParams, output: TokenIds) -> None:
        """Hold the sequence of a slot to its ``allowed_token_ids``, ``bad_words_token_ids`` and
        ``max_reasoning_tokens``, if it has any. If it has a grammar, it was admitted before.

        Args:
            output: the tokens generated before a retraction.
        """
        if sampling.max_reasoning_tokens is not None:
            symbols_of = self.loader.tag_masks.symbols_of
            self._budgets[slot] = ReasoningBudget(sampling, output, symbols_of)
        if not sampling.restricts_tokens:
            return
        ends = self._eos_token_ids if slot in self._by_slot else []
        self._restrictions[slot] = TokenRestriction(sampling, output, self._num_words, ends)

    def release(self, slot: int) -> None:
        if (entry := self._by_slot.pop(slot, None)) is not None:
            self.loader.release(self._grammars.pop(slot), entry.slow_s)
        self._restrictions.pop(slot, None)
        self._budgets.pop(slot, None)

    @property
    def holds_any(self) -> bool:
        """Some sequence is held to a grammar, to a list of tokens, or to a bound of its
        reasoning."""
        return bool(self._by_slot or self._restrictions or self._budgets)

    # ------------------------------------------------------------ a step

    def begin_masks(
        self, slots: NDArray[np.int64], drafts: Mapping[int, TokenIds] = NO_DRAFTS
    ) -> list[MaskJob | None]:
        """Begin to fill the masks of ``slots`` [rows] in threads. Returns the job of each; None if
        it needs none."""
        if not self._by_slot:
            return []
        rows = slots.tolist()
        new = []
        for slot in rows:
            if (entry := self._by_slot.get(slot)) is not None:
                job = entry.begin_job(drafts[slot].tolist() if slot in drafts else ())
                if job is not None:
                    new.append(job)
        if new:
            self._filler.begin(new)
        return [entry.job if (entry := self._by_slot.get(slot)) else None for slot in rows]

    def rows_ready(self, slots: NDArray[np.int64], *, alone: bool) -> NDArray[np.bool_] | None:
        """Wait for the masks of ``slots`` [rows], as long as the budget allows.

        Args:
            alone: the step does nothing else, so it waits longer until some row is ready.

        Returns:
            [rows] whether a row can be sampled now; None if all can. The same on every rank.
        """
        each = self.begin_masks(slots)
        jobs = [job for job in dict.fromkeys(each) if job is not None]
        if not jobs:
            return None
        quick = [job for job in jobs if not job.expected_slow]
        self._filler.wait(jobs, SLOW_MASK_BUDGET_S)
        self._filler.wait(quick, MASK_BUDGET_S - SLOW_MASK_BUDGET_S)
        if alone and None not in each:
            self._filler.wait(jobs, ALONE_BUDGET_S, count=1)
        ready = self._decide(np.array([job is None or job.is_done for job in each]))
        taken = dict.fromkeys(job for job, now in zip(each, ready, strict=True) if now and job)
        self._filler.wait(list(taken))
        return None if ready.all() else ready

    def mask(
        self, slots: NDArray[np.int64], drafted: NDArray[np.int64] | None = None
    ) -> TokenMask | None:
        """The allowed tokens of the rows ``slots`` [rows], which are ready; None if no row is
        constrained.

        Args:
            drafted: [rows] the draft behind each row, see
                :mod:`radixrt.worker.drafts.verification`.
        """
        if not self.holds_any:
            return None
        held = self._by_slot.keys() | self._restrictions.keys() | self._budgets.keys()
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in held]
        if not rows:
            return None
        bits = np.full((len(rows), self._num_words), ALL_TOKENS, dtype=np.int32)
        unfilled: list[int] = []
        ahead: ConstraintsAhead | None = None
        for bitmask, row in zip(bits, rows, strict=True):
            slot = int(slots[row])
            draft = NO_DRAFT if drafted is None else int(drafted[row])
            if ahead is None:
                ahead = None if draft == NO_DRAFT else self._ahead(slot)
                self._mask_next(slot, bitmask)
            elif not ahead.fill(bitmask):
                unfilled.append(row)
            if draft == NO_DRAFT:
                ahead = None
            elif ahead is not None:
                ahead.take(draft)
        return TokenMask(np.array(rows, dtype=np.int64), bits, np.array(unfilled, dtype=np.int64))

    def _ahead(self, slot: int) -> ConstraintsAhead:
        """The constraints of a slot, to be followed along a draft."""
        entry = self._by_slot.get(slot)
        grammar = None if entry is None else entry.ahead()
        return ConstraintsAhead(grammar, self._restrictions.get(slot), self._budgets.get(slot))

    def _mask_next(self, slot: int, row: BitmaskRow) -> None:
        """Fill the mask of the next token of a slot."""
        budget = self._budgets.get(slot)
        entry = self._by_slot.get(slot)
        if budget is not None and budget.next_token is not None:
            allow_only(row, budget.next_token)
            if entry is not None:  # a grammar that covers the reasoning too
                entry.job = None
            return
        if entry is not None:
            entry.apply(row)
        if (restriction := self._restrictions.get(slot)) is not None:
            restriction.apply(row)
            restriction.failed = not row.any()
        if not row.any():
            row.fill(ALL_TOKENS)  # the sampled token is not used

    def failed(self, slots: NDArray[np.int64]) -> set[int]:
        """The ones of ``slots`` [rows] that can't go on."""
        held = (self._by_slot, self._restrictions)
        return {
            slot
            for slot in slots.tolist()
            if any((one := of.get(slot)) is not None and one.failed for of in held)
        }

    def advance(self, slots: NDArray[np.int64], token_ids: TokenIds) -> list[int]:
        """Take the sampled tokens [rows] of ``slots`` [rows]; returns the rows at which their slots
        can't go on."""
        failed: list[int] = []
        if not self.holds_any:
            return failed
        for row, (slot, token) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
            entry, restriction = self._by_slot.get(slot), self._restrictions.get(slot)
            if restriction is not None and token >= 0:
                restriction.advance([token])
            if (budget := self._budgets.get(slot)) is not None and token >= 0:
                budget.advance([token])
                if budget.is_over:
                    del self._budgets[slot]
            if entry is None or token < 0:
                continue
            entry.take([token])
            if entry.failed:
                failed.append(row)
        return failed

    def allowed(self, slot: int, draft: list[int]) -> list[int]:
        """The leading tokens of a draft that the grammar of a slot allows."""
        entry = self._by_slot.get(slot)
        return draft if entry is None else entry.allowed(draft)

    def forced(self, slot: int) -> list[int]:
        """The tokens that the grammar of a slot forces next and that may not be jumped over."""
        entry = self._by_slot.get(slot)
        if entry is None or not self._jump_forward:
            return []
        return entry.forced_to_sample()

    def take_forced(self, slots: NDArray[np.int64], at_least: int = 1) -> dict[int, list[int]]:
        """The tokens that must come next in ``slots`` [rows]; the matchers have taken them.

        Args:
            at_least: fewer are not worth it, and left to be sampled.
        """
        if not self._by_slot or not self._jump_forward:
            return {}
        all_forced = {
            slot: entry.take_forced(at_least)
            for slot in dict.fromkeys(slots.tolist())
            if (entry := self._by_slot.get(slot)) is not None
        }
        return {slot: forced for slot, forced in all_forced.items() if forced}

    def sample_next(self, slot: int, token: int) -> None:
        """Let the next mask of a slot allow only this token, which :meth:`take_forced` has
        taken."""
        self._by_slot[slot].sample_next(token)
