"""Keeps the matcher of each constrained slot, and fills the bitmask of tokens that each may sample next.

A grammar is loaded once (:mod:`radixrt.worker.sampling.grammar_loader`) and its matcher forked for every sequence
that uses it. The bitmask is filled by threads beside the forward pass; the sampler applies it. A row whose mask is not
ready in time is not sampled in this step. Then the matchers take the sampled tokens. They can also list the tokens that
must follow (jump-forward). Lists of allowed tokens, forbidden token sequences and the bound of the reasoning restrict the same bitmask.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixrt.base.sampling_params import SamplingParams
from radixrt.base.tags import GrammarStart, Symbols, tag_symbols
from radixrt.constrained.bitmask import BitmaskRow, bitmask_words
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.matcher import Matcher
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import PackedIds, TokenIds, unpack_ids
from radixrt.worker.drafts.verification import NO_DRAFT
from radixrt.worker.sampling.constraints_ahead import ConstraintsAhead
from radixrt.worker.sampling.forbidden_paths import ForbiddenPaths, allow_only
from radixrt.worker.sampling.grammar_loader import GrammarLoader
from radixrt.worker.sampling.mask_filling import SLOW_S, MaskFiller, MaskJob
from radixrt.worker.sampling.reasoning_budget import ReasoningBudget
from radixrt.worker.sampling.restrictions import TokenRestriction
from radixrt.worker.sampling.tag_masks import TagMasks

log = logging.getLogger(__name__)

ALL_TOKENS = -1
"""A word of the bitmask with every bit set."""

MASK_BUDGET_S = 0.002
"""Time that a step's other rows wait for the masks of rows that are usually quick."""
SLOW_MASK_BUDGET_S = 0.0002
"""Time that they wait for the others."""
NO_DRAFTS: Mapping[int, TokenIds] = {}

_SLOW_MEMORY = 16
"""Masks that are expected to be slow after one that was."""


NO_ROWS = np.empty(0, dtype=np.int64)


ALONE_BUDGET_S = 0.02
"""Longest wait of a step that does nothing else; a request that arrives meanwhile waits too."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that the constrained rows of a batch may sample."""

    rows: NDArray[np.int64]  # [n] rows of the batch, ascending
    bits: NDArray[np.int32]  # [n, words], see radixrt.constrained.bitmask
    unfilled: NDArray[np.int64] = field(default_factory=NO_ROWS.copy)
    """Rows behind drafts at which the constraints can't be kept, so that nothing is sampled there: [m]."""


@dataclass(eq=False, slots=True)
class _SlotMatcher:
    """The state of one constrained sequence.

    The matcher of an ambiguous grammar is used by the threads that fill masks alone, because each of its calls may take long:
    it takes the tokens of the sequence ahead of the next mask.
    """

    matcher: Matcher
    start: GrammarStart
    may_jump: bool
    fresh: Matcher | None = None
    """In its initial state, while the answer may be the grammar's or open its reasoning: ``matcher`` has taken it."""
    is_excluded: bool = False
    """The grammar does not allow the answer so far, which can only be the beginning of a reasoning."""
    forbidden: ForbiddenPaths | None = None
    next_token: int | None = None
    """The matcher has taken it already: it must be sampled next."""
    failed: bool = False
    pending: list[int] = field(default_factory=list)
    """Of an ambiguous grammar: the tokens that its matcher has not taken yet."""
    excluded: tuple[int, Callable[[Matcher], ForbiddenPaths]] | None = None
    """Of an ambiguous grammar: what makes the forbidden paths, and the number of pending tokens ahead of them."""
    forced: list[int] = field(default_factory=list)
    """Of an ambiguous grammar: the tokens that must come next, as the job of the last mask has found."""
    job: MaskJob | None = None
    """Fills the mask of the next token; the matcher must not be used until it is done."""
    expected_slow: int = 0
    """The next masks, this many, are expected to be slow."""

    @property
    def is_ambiguous(self) -> bool:
        return self.matcher.is_ambiguous

    @property
    def fills_masks(self) -> bool:
        """The grammar decides on the next token."""
        if self.start.opened is None:
            return not self.is_excluded
        return self.start.has_begun

    def catch_up(self) -> bool:
        """Let the matcher take what is pending; returns whether the grammar allows it. Called in a thread."""
        tokens, self.pending = self.pending, []
        if self.excluded is not None:
            (ahead, make), self.excluded = self.excluded, None
            if self.matcher.advance(tokens[:ahead]) < ahead:
                return False
            tokens = tokens[ahead:]
            self.forbidden = make(self.matcher)
            self.forbidden.advance(tokens)
        return self.matcher.advance(tokens) == len(tokens)


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
            loader: of the grammars.
            vocab_size: of the model.
            eos_token_ids: of the model.
            jump_forward: forced tokens are not sampled.
            decide: from the rows [n] whose masks are ready on this rank to those on which all ranks agree.
        """
        self.loader = loader
        self._num_words = bitmask_words(vocab_size)
        self._eos_token_ids = list(eos_token_ids)
        self._jump_forward = jump_forward
        self._decide = decide
        self._filler = MaskFiller()
        self._by_slot: dict[int, _SlotMatcher] = {}
        self._restrictions: dict[int, TokenRestriction] = {}
        """Of the slots whose requests have ``allowed_token_ids`` or ``bad_words``."""
        self._budgets: dict[int, ReasoningBudget] = {}
        """Of the slots whose reasoning has not ended and is bounded."""

    def admit(self, slot: int, use: GrammarUse, output: TokenIds, *, may_jump: bool) -> None:
        """Hold the sequence of a slot to a grammar.

        Args:
            slot: a free one.
            use: which grammar, and from where on.
            output: the tokens generated before a retraction; the matcher takes them again.
            may_jump: forced tokens may be given without being sampled.
        """
        tags = use.opening, use.begin_after, use.then_after
        entry = _SlotMatcher(
            self.loader.matcher(use.key), GrammarStart(*map(self._symbols, tags)), may_jump
        )
        self._by_slot[slot] = entry
        self._take(entry, output[: use.excluded_from].tolist())
        if use.excluded and not entry.failed:
            paths = [unpack_ids(path).tolist() for path in use.excluded]

            def forbid_paths(matcher: Matcher) -> ForbiddenPaths:
                return ForbiddenPaths(matcher, paths, self._num_words)

            if entry.is_ambiguous:
                entry.excluded = len(entry.pending), forbid_paths
            else:
                entry.forbidden = forbid_paths(entry.matcher)
        self._take(entry, output[use.excluded_from :].tolist())

    def restrict(self, slot: int, sampling: SamplingParams, output: TokenIds) -> None:
        """Hold the sequence of a slot to its ``allowed_token_ids``, ``bad_words_token_ids`` and ``max_reasoning_tokens``, if it
        has any. If it has a grammar, it was admitted before.

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
        self._by_slot.pop(slot, None)
        self._restrictions.pop(slot, None)
        self._budgets.pop(slot, None)

    @property
    def holds_any(self) -> bool:
        """Some sequence is held to a grammar, to a list of tokens, or to a bound of its reasoning."""
        return bool(self._by_slot or self._restrictions or self._budgets)

    # ------------------------------------------------------------ a step

    def begin_masks(
        self, slots: NDArray[np.int64], drafts: Mapping[int, TokenIds] = NO_DRAFTS
    ) -> list[MaskJob | None]:
        """Begin to fill the masks of ``slots`` [rows] in threads. Returns the job of each; None if it needs none.

        Args:
            drafts: of slots that verify some.
        """
        if not self._by_slot:
            return []
        rows = slots.tolist()
        new = []
        for slot in rows:
            entry = self._by_slot.get(slot)
            if entry is not None and _lacks_job(entry):
                row = np.empty(self._num_words, dtype=np.int32)
                draft = drafts[slot].tolist() if slot in drafts else ()
                is_slow = entry.expected_slow > 0
                catch_up = entry.catch_up if entry.is_ambiguous else None
                entry.job = MaskJob(
                    entry.matcher, row, expected_slow=is_slow, draft=draft, catch_up=catch_up
                )
                new.append(entry.job)
        if new:
            self._filler.begin(new)
        return [entry.job if (entry := self._by_slot.get(slot)) else None for slot in rows]

    def rows_ready(self, slots: NDArray[np.int64], *, alone: bool) -> NDArray[np.bool_] | None:
        """Wait for the masks of ``slots`` [rows], as long as the budget allows.

        Args:
            slots: that are to be sampled.
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
        """The allowed tokens of the rows ``slots`` [rows], which are ready; None if no row is constrained.

        Args:
            drafted: [rows] the draft behind each row, see :mod:`radixrt.worker.drafts.verification`.
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
        entry, restriction = self._by_slot.get(slot), self._restrictions.get(slot)
        rows: list[BitmaskRow] | None = None
        forbidden: ForbiddenPaths | None = None
        waiting: tuple[GrammarStart, TagMasks] | None = None
        if entry is not None and entry.job is not None:
            rows, forbidden = entry.job.draft_rows, entry.forbidden
        elif entry is not None:  # the grammar has not begun
            waiting = entry.start, self.loader.tag_masks
        return ConstraintsAhead(rows, waiting, forbidden, restriction, self._budgets.get(slot))

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
            self._apply_grammar(entry, row)
        if (restriction := self._restrictions.get(slot)) is not None:
            restriction.apply(row)
            restriction.failed = not row.any()
        if not row.any():
            row.fill(ALL_TOKENS)  # the sampled token is not used

    def _apply_grammar(self, entry: _SlotMatcher, row: BitmaskRow) -> None:
        if entry.job is not None:
            _take_mask(entry, entry.job, row)
        elif entry.next_token is not None:
            allow_only(row, entry.next_token)
            entry.next_token = None
        elif entry.start.opened and not entry.start.has_begun:
            row &= self.loader.tag_masks.waiting(entry.start)
        if entry.start.opened is None:
            entry.is_excluded, entry.failed = entry.is_excluded or entry.failed, False
            if entry.is_excluded:
                row.fill(0)
            row |= self.loader.tag_masks.openers(entry.start)
        entry.failed = entry.failed or not row.any()
        if entry.failed:
            row.fill(ALL_TOKENS)  # the sampled token is not used

    def failed(self, slots: NDArray[np.int64]) -> set[int]:
        """Those of ``slots`` [rows] that can't go on."""
        held = (self._by_slot, self._restrictions)
        return {
            slot
            for slot in slots.tolist()
            if any((one := of.get(slot)) is not None and one.failed for of in held)
        }

    def advance(self, slots: NDArray[np.int64], token_ids: TokenIds) -> list[int]:
        """Take the sampled tokens [rows] of ``slots`` [rows]; returns the rows at which their slots can't go on."""
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
            self._take(entry, [token])
            if entry.failed:
                failed.append(row)
        return failed

    def allowed(self, slot: int, draft: list[int]) -> list[int]:
        """The leading tokens of a draft that the grammar of a slot allows. A draft ends where the grammar begins."""
        entry = self._by_slot.get(slot)
        if entry is None:
            return draft
        if entry.failed or entry.start.opened is None:
            return []
        if not entry.start.has_begun:
            start, symbols_of = entry.start.fork(), self.loader.tag_masks.symbols_of
            for index, token in enumerate(draft):
                start.push(symbols_of(token))
                if start.has_begun:
                    return draft[:index]
            return draft
        if entry.is_ambiguous:
            return []  # each token would need a further mask, and one may take a second
        try:
            num_taken = entry.matcher.advance(draft)
            entry.matcher.rollback(num_taken)
        except GrammarExhausted:
            return []
        return draft[:num_taken]

    def forced(self, slot: int) -> list[int]:
        """The tokens that the grammar of a slot forces next and that may not be jumped over."""
        entry = self._by_slot.get(slot)
        if entry is None or entry.may_jump or entry.failed or not self._jump_forward:
            return []
        if not entry.start.has_begun:
            return []
        if entry.is_ambiguous:
            return entry.forced
        try:
            return entry.matcher.forced_tokens()
        except GrammarExhausted:
            return []

    def take_forced(self, slots: NDArray[np.int64], at_least: int = 1) -> dict[int, list[int]]:
        """The tokens that must come next in ``slots`` [rows]; the matchers have taken them.

        Args:
            at_least: fewer are not worth it, and left to be sampled.
        """
        if not self._by_slot or not self._jump_forward:
            return {}
        all_forced = {
            slot: self._take_forced(entry, at_least)
            for slot in dict.fromkeys(slots.tolist())
            if (entry := self._by_slot.get(slot)) is not None and entry.may_jump
        }
        return {slot: forced for slot, forced in all_forced.items() if forced}

    def sample_next(self, slot: int, token: int) -> None:
        """Let the next mask of a slot allow only this token, which :meth:`take_forced` has taken."""
        self._by_slot[slot].next_token = token

    def _take_forced(self, entry: _SlotMatcher, at_least: int) -> list[int]:
        if entry.failed or not entry.start.has_begun:
            return []
        if entry.is_ambiguous:
            tokens = entry.forced if len(entry.forced) >= at_least else []
            self._take(entry, tokens)
            return tokens
        try:
            tokens = entry.matcher.forced_tokens()
            if len(tokens) + 1 < at_least:  # an end token may follow
                return []
            self._take(entry, tokens)
            ended = entry.matcher.is_terminated()
        except GrammarExhausted:
            return []  # the next mask will fail too, and say so
        return [*tokens, self._eos_token_ids[0]] if ended else tokens

    def _take(self, entry: _SlotMatcher, tokens: list[int]) -> None:
        if entry.failed or not tokens:
            return
        for position, token in enumerate(tokens):
            if entry.start.has_begun:
                self._advance(entry, tokens[position:])
                return
            was_decided = entry.start.opened is not None
            entry.start.push(self.loader.tag_masks.symbols_of(token))
            if not was_decided:
                self._take_first(entry, token)

    def _take_first(self, entry: _SlotMatcher, token: int) -> None:
        """Take one of the first tokens, which may be the grammar's or open the reasoning."""
        if entry.start.opened:
            if entry.fresh is not None:
                entry.matcher, entry.fresh, entry.forbidden = entry.fresh, None, None
                entry.pending, entry.excluded, entry.forced = [], None, []
            entry.is_excluded = False
            return
        if entry.start.opened is None and entry.fresh is None:
            entry.fresh = entry.matcher.fork()
        if not entry.is_excluded:
            self._advance(entry, [token])
        if entry.start.opened is None:
            entry.is_excluded, entry.failed = entry.is_excluded or entry.failed, False
        else:
            entry.failed, entry.fresh = entry.failed or entry.is_excluded, None

    def _symbols(self, tag: PackedIds) -> Symbols:
        return (
            tag_symbols(unpack_ids(tag).tolist(), self.loader.tag_masks.symbols_of) if tag else ()
        )

    def _advance(self, entry: _SlotMatcher, tokens: list[int]) -> None:
        if entry.forbidden is not None:
            entry.forbidden.advance(tokens)
        if tokens[-1] in self._eos_token_ids:  # the answer is over
            tokens = tokens[:-1]
        if entry.is_ambiguous:
            is_forced = entry.forced[: len(tokens)] == tokens
            entry.forced = entry.forced[len(tokens) :] if is_forced else []
            entry.pending += tokens
            return
        try:
            entry.failed = entry.matcher.advance(tokens) < len(tokens)
        except GrammarExhausted as error:
            log.warning("Matcher failed: %s", error)
            entry.failed = True


def _lacks_job(entry: _SlotMatcher) -> bool:
    """Whether its matcher is to fill the mask of the next token, and was not told to."""
    return entry.job is None and entry.fills_masks and not entry.failed and entry.next_token is None


def _take_mask(entry: _SlotMatcher, job: MaskJob, row: BitmaskRow) -> None:
    """Write the mask that is ready over ``row``."""
    entry.job = None
    entry.expected_slow = _SLOW_MEMORY if job.cpu_s > SLOW_S else max(0, entry.expected_slow - 1)
    entry.failed = job.failed
    entry.forced = job.forced
    if job.failed:
        return
    row[:] = job.row
    if entry.forbidden is not None:
        entry.forbidden.forbid(row)
