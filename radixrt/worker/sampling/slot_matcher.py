"""Follows the grammar of one sequence: where it begins, what its matcher has taken, and what it
allows next."""

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from radixrt.base.tags import GrammarStart, Symbols, tag_symbols
from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.matcher import Matcher
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import PackedIds, TokenIds, unpack_ids
from radixrt.worker.sampling.grammar_loader import TagMasks
from radixrt.worker.sampling.mask_filling import SLOW_S, MaskJob
from radixrt.worker.sampling.restrictions import (
    ALL_TOKENS,
    ForbiddenPaths,
    ReasoningBudget,
    TokenRestriction,
    allow_only,
)

log = logging.getLogger(__name__)

_SLOW_MEMORY = 16
"""Masks that are expected to be slow after one that was."""


class GrammarAhead:
    """The grammar of one slot, followed along its draft.

    Args:
        rows: what it allows behind each token of the draft, as far as that could be filled.
        waiting: where it begins, which the draft does not reach, and the masks until then; None: it
            has begun.
    """

    def __init__(
        self,
        rows: list[BitmaskRow],
        waiting: tuple[GrammarStart, TagMasks] | None,
        forbidden: ForbiddenPaths | None,
    ) -> None:
        self._rows = iter(rows)
        self._row: BitmaskRow | None = None
        self._waiting = waiting
        self._forbidden = forbidden

    def take(self, token: int) -> None:
        """Go on behind a token of the draft."""
        self._row = next(self._rows, None)
        if self._waiting is not None:
            start, masks = self._waiting
            self._waiting = start.fork(), masks
            self._waiting[0].push(masks.symbols_of(token))
        if self._forbidden is not None:
            self._forbidden = self._forbidden.fork()
            self._forbidden.advance([token])

    def fill(self, row: BitmaskRow) -> bool:
        """Restrict a row in which all tokens are allowed; False if what is allowed is not known."""
        if self._waiting is not None:
            start, masks = self._waiting
            row &= masks.waiting(start)
        elif self._row is None:
            return False
        else:
            row[:] = self._row
            if self._forbidden is not None:
                self._forbidden.forbid(row)
        return True


@dataclass(slots=True)
class ConstraintsAhead:
    """The constraints of one slot, followed along its draft. Those of the slot stay as they are."""

    grammar: GrammarAhead | None
    restriction: TokenRestriction | None
    budget: ReasoningBudget | None

    def take(self, token: int) -> None:
        """Go on behind a token of the draft."""
        if self.grammar is not None:
            self.grammar.take(token)
        if self.restriction is not None:
            self.restriction = copy.copy(self.restriction)
            self.restriction.advance([token])
        if self.budget is not None:
            self.budget = self.budget.fork()
            self.budget.advance([token])

    def fill(self, row: BitmaskRow) -> bool:
        """Restrict a row in which all tokens are allowed. False: no token is left, or the row is
        not known."""
        if self.budget is not None and self.budget.next_token is not None:
            allow_only(row, self.budget.next_token)
            return True
        if self.grammar is not None and not self.grammar.fill(row):
            return False
        if self.restriction is not None:
            self.restriction.apply(row)
        if row.any():
            return True
        row.fill(ALL_TOKENS)
        return False


class SlotMatcher:
    """The state of one constrained sequence.

    The matcher of an ambiguous grammar is used by the threads that fill masks alone, because each
    of its calls may take long: it takes the tokens of the sequence ahead of the next mask.

    Attributes:
        failed: the grammar allows no token, or its matcher can't go on.
        job: fills the mask of the next token; the matcher must not be used until it is done.
    """

    def __init__(
        self,
        matcher: Matcher,
        use: GrammarUse,
        output: TokenIds,
        *,
        tag_masks: TagMasks,
        eos_token_ids: Sequence[int],
        num_words: int,
        may_jump: bool,
    ) -> None:
        """
        Args:
            use: from where on it is used, and what is excluded.
            output: the tokens generated before a retraction; the matcher takes them again.
            may_jump: forced tokens may be given without being sampled.
        """
        self.failed = False
        self.job: MaskJob | None = None
        self._matcher = matcher
        self._tag_masks = tag_masks
        self._eos_token_ids = eos_token_ids
        self._num_words = num_words
        self._may_jump = may_jump
        tags = use.opening, use.begin_after, use.then_after
        self._start = GrammarStart(*map(self._symbols, tags))
        self._fresh: Matcher | None = None
        """In its initial state, while the answer may be the grammar's or open its reasoning: the
        matcher has taken it."""
        self._is_excluded = False
        """The grammar does not allow the answer so far, which can only be the beginning of a
        reasoning."""
        self._forbidden: ForbiddenPaths | None = None
        self._next_token: int | None = None
        """The matcher has taken it already: it must be sampled next."""
        self._pending: list[int] = []
        """Tokens that the matcher of an ambiguous grammar has not taken yet."""
        self._excluded: tuple[int, Callable[[Matcher], ForbiddenPaths]] | None = None
        """For an ambiguous grammar: what makes the forbidden paths, and the number of pending
        tokens ahead of them."""
        self._forced: list[int] = []
        """For an ambiguous grammar: the tokens that must come next, as the job of the last mask has
        found."""
        self._slow_s = 0.0
        self._expected_slow = 0
        """The next masks, this many, are expected to be slow."""
        self.take(output[: use.excluded_from].tolist())
        if use.excluded and not self.failed:
            self._exclude([unpack_ids(path).tolist() for path in use.excluded])
        self.take(output[use.excluded_from :].tolist())

    @property
    def slow_s(self) -> float:
        """CPU time of the slow masks so far, in seconds; infinite while one is being filled."""
        if self.job is not None and not self.job.is_done:
            return math.inf
        return self._slow_s

    def _symbols(self, tag: PackedIds) -> Symbols:
        symbols_of = self._tag_masks.symbols_of
        return tag_symbols(unpack_ids(tag).tolist(), symbols_of) if tag else ()

    def _exclude(self, paths: list[list[int]]) -> None:
        def forbid_paths(matcher: Matcher) -> ForbiddenPaths:
            return ForbiddenPaths(matcher, paths, self._num_words)

        if self._matcher.is_ambiguous:
            self._excluded = len(self._pending), forbid_paths
        else:
            self._forbidden = forbid_paths(self._matcher)

    # ------------------------------------------------------------ masks

    def begin_job(self, draft: Sequence[int]) -> MaskJob | None:
        """Make the job that fills the mask of the next token, and those behind a draft; None if the
        matcher has one already, or is to fill none."""
        if self.job is not None or self.failed or self._next_token is not None:
            return None
        if not self._fills_masks:
            return None
        self.job = MaskJob(
            self._matcher,
            np.empty(self._num_words, dtype=np.int32),
            expected_slow=self._expected_slow > 0,
            draft=draft,
            catch_up=self._catch_up if self._matcher.is_ambiguous else None,
        )
        return self.job

    @property
    def _fills_masks(self) -> bool:
        """The grammar decides on the next token."""
        if self._start.opened is None:
            return not self._is_excluded
        return self._start.has_begun

    def _catch_up(self) -> bool:
        """Let the matcher take what is pending; returns whether the grammar allows it. Called in a
        thread."""
        tokens, self._pending = self._pending, []
        if self._excluded is not None:
            (ahead, make), self._excluded = self._excluded, None
            if self._matcher.advance(tokens[:ahead]) < ahead:
                return False
            tokens = tokens[ahead:]
            self._forbidden = make(self._matcher)
            self._forbidden.advance(tokens)
        return self._matcher.advance(tokens) == len(tokens)

    def apply(self, row: BitmaskRow) -> None:
        """Write the mask of the next token, whose job is done, over ``row``."""
        if self.job is not None:
            self._take_mask(self.job, row)
        elif self._next_token is not None:
            allow_only(row, self._next_token)
            self._next_token = None
        elif self._start.opened and not self._start.has_begun:
            row &= self._tag_masks.waiting(self._start)
        if self._start.opened is None:
            self._is_excluded, self.failed = self._is_excluded or self.failed, False
            if self._is_excluded:
                row.fill(0)
            row |= self._tag_masks.openers(self._start)
        self.failed = self.failed or not row.any()
        if self.failed:
            row.fill(ALL_TOKENS)  # the sampled token is not used

    def _take_mask(self, job: MaskJob, row: BitmaskRow) -> None:
        self.job = None
        slow = job.cpu_s > SLOW_S
        self._slow_s += job.cpu_s * slow
        self._expected_slow = _SLOW_MEMORY if slow else max(0, self._expected_slow - 1)
        self.failed = job.failed
        self._forced = job.forced
        if job.failed:
            return
        row[:] = job.row
        if self._forbidden is not None:
            self._forbidden.forbid(row)

    def ahead(self) -> GrammarAhead:
        """The grammar, to be followed along a draft."""
        if self.job is None:  # it has not begun
            return GrammarAhead([], (self._start, self._tag_masks), None)
        return GrammarAhead(self.job.draft_rows, None, self._forbidden)

    # ------------------------------------------------------------ tokens

    def allowed(self, draft: list[int]) -> list[int]:
        """The leading tokens of a draft that the grammar allows. A draft ends where the grammar
        begins."""
        if self.failed or self._start.opened is None:
            return []
        if not self._start.has_begun:
            start, symbols_of = self._start.fork(), self._tag_masks.symbols_of
            for index, token in enumerate(draft):
                start.push(symbols_of(token))
                if start.has_begun:
                    return draft[:index]
            return draft
        if self._matcher.is_ambiguous:
            return []  # each token would need a further mask, and one may take a second
        try:
            num_taken = self._matcher.advance(draft)
            self._matcher.rollback(num_taken)
        except GrammarExhausted:
            return []
        return draft[:num_taken]

    def forced_to_sample(self) -> list[int]:
        """The tokens that must come next and may not be jumped over."""
        if self._may_jump or self.failed or not self._start.has_begun:
            return []
        if self._matcher.is_ambiguous:
            return []  # nothing is drafted
        try:
            return self._matcher.forced_tokens()
        except GrammarExhausted:
            return []

    def take_forced(self, at_least: int) -> list[int]:
        """Take the tokens that must come next; none if they are fewer than ``at_least``, or may not
        be jumped over."""
        if not self._may_jump or self.failed or not self._start.has_begun:
            return []
        if self._matcher.is_ambiguous:
            tokens = self._forced if len(self._forced) >= at_least else []
            self.take(tokens)
            return tokens
        try:
            tokens = self._matcher.forced_tokens()
            if len(tokens) + 1 < at_least:  # an end token may follow
                return []
            self.take(tokens)
            ended = self._matcher.is_terminated()
        except GrammarExhausted:
            return []  # the next mask will fail too, and say so
        return [*tokens, self._eos_token_ids[0]] if ended else tokens

    def sample_next(self, token: int) -> None:
        """Let the next mask allow only this token, which :meth:`take_forced` has taken."""
        self._next_token = token

    def take(self, tokens: list[int]) -> None:
        """Take tokens that are final."""
        if self.failed or not tokens:
            return
        for position, token in enumerate(tokens):
            if self._start.has_begun:
                self._advance(tokens[position:])
                return
            was_decided = self._start.opened is not None
            self._start.push(self._tag_masks.symbols_of(token))
            if not was_decided:
                self._take_first(token)

    def _take_first(self, token: int) -> None:
        """Take one of the first tokens, which may be the grammar's or open the reasoning."""
        if self._start.opened:
            if self._fresh is not None:
                self._matcher, self._fresh, self._forbidden = self._fresh, None, None
                self._pending, self._excluded, self._forced = [], None, []
            self._is_excluded = False
            return
        if self._start.opened is None and self._fresh is None:
            self._fresh = self._matcher.fork()
        if not self._is_excluded:
            self._advance([token])
        if self._start.opened is None:
            self._is_excluded, self.failed = self._is_excluded or self.failed, False
        else:
            self.failed, self._fresh = self.failed or self._is_excluded, None

    def _advance(self, tokens: list[int]) -> None:
        if self._forbidden is not None:
            self._forbidden.advance(tokens)
        if tokens[-1] in self._eos_token_ids:  # the answer is over
            tokens = tokens[:-1]
        if self._matcher.is_ambiguous:
            is_forced = self._forced[: len(tokens)] == tokens
            self._forced = self._forced[len(tokens) :] if is_forced else []
            self._pending += tokens
            return
        try:
            self.failed = self._matcher.advance(tokens) < len(tokens)
        except GrammarExhausted as error:
            log.warning("Matcher failed: %s", error)
            self.failed = True
