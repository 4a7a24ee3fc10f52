"""Fills the bitmask behind each token of a draft, as if the tokens before it were final."""

import copy

from radixrt.base.tags import GrammarStart
from radixrt.constrained.bitmask import BitmaskRow
from radixrt.worker.sampling.forbidden_paths import ForbiddenPaths, allow_only
from radixrt.worker.sampling.reasoning_budget import ReasoningBudget
from radixrt.worker.sampling.restrictions import TokenRestriction
from radixrt.worker.sampling.tag_masks import TagMasks


class ConstraintsAhead:
    """The constraints of one slot, followed along its draft. Those of the slot stay as they are.

    Args:
        grammar_rows: what the grammar allows behind each token of the draft, as far as it could be filled; None: there is no
            grammar, or it has not begun.
        waiting: where a grammar begins that has not, which the draft does not reach, and the masks until then.
        forbidden: paths that the answer must not take.
        restriction: of the request.
        budget: of the reasoning.
    """

    def __init__(
        self,
        grammar_rows: list[BitmaskRow] | None,
        waiting: tuple[GrammarStart, TagMasks] | None,
        forbidden: ForbiddenPaths | None,
        restriction: TokenRestriction | None,
        budget: ReasoningBudget | None,
    ) -> None:
        self._grammar_rows = grammar_rows
        self._waiting = waiting
        self._forbidden = forbidden
        self._restriction = restriction
        self._budget = budget
        self._num_taken = 0

    def take(self, token: int) -> None:
        """Go on behind a token of the draft."""
        if self._waiting is not None:
            start, masks = self._waiting
            self._waiting = start.fork(), masks
            self._waiting[0].push(masks.symbols_of(token))
        if self._forbidden is not None:
            self._forbidden = self._forbidden.fork()
            self._forbidden.advance([token])
        if self._restriction is not None:
            self._restriction = copy.copy(self._restriction)
            self._restriction.advance([token])
        if self._budget is not None:
            self._budget = self._budget.fork()
            self._budget.advance([token])
        self._num_taken += 1

    def fill(self, row: BitmaskRow) -> bool:
        """Restrict a row in which all tokens are allowed. False: no token is left, or the row is not known."""
        if self._budget is not None and self._budget.next_token is not None:
            allow_only(row, self._budget.next_token)
            return True
        if self._grammar_rows is not None:
            if self._num_taken > len(self._grammar_rows):
                return False
            row[:] = self._grammar_rows[self._num_taken - 1]
            if self._forbidden is not None:
                self._forbidden.forbid(row)
        if self._waiting is not None:
            start, masks = self._waiting
            row &= masks.waiting(start)
        if self._restriction is not None:
            self._restriction.apply(row)
        if row.any():
            return True
        row.fill(-1)
        return False
