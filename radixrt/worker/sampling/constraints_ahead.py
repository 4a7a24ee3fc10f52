"""Fills the bitmask behind each token of a draft, as if the tokens before it were final."""

import copy

from radixrt.base.tags import GrammarStart
from radixrt.constrained.bitmask import BitmaskRow
from radixrt.worker.sampling.forbidden_paths import ALL_TOKENS, ForbiddenPaths, allow_only
from radixrt.worker.sampling.reasoning_budget import ReasoningBudget
from radixrt.worker.sampling.restrictions import TokenRestriction
from radixrt.worker.sampling.tag_masks import TagMasks


class GrammarAhead:
    """The grammar of one slot, followed along its draft.

    Args:
        rows: what it allows behind each token of the draft, as far as that could be filled.
        waiting: where it begins, which the draft does not reach, and the masks until then; None: it
            has begun.
        forbidden: paths that the answer must not take.
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


class ConstraintsAhead:
    """The constraints of one slot, followed along its draft. Those of the slot stay as they are."""

    def __init__(
        self,
        grammar: GrammarAhead | None,
        restriction: TokenRestriction | None,
        budget: ReasoningBudget | None,
    ) -> None:
        self._grammar = grammar
        self._restriction = restriction
        self._budget = budget

    def take(self, token: int) -> None:
        """Go on behind a token of the draft."""
        if self._grammar is not None:
            self._grammar.take(token)
        if self._restriction is not None:
            self._restriction = copy.copy(self._restriction)
            self._restriction.advance([token])
        if self._budget is not None:
            self._budget = self._budget.fork()
            self._budget.advance([token])

    def fill(self, row: BitmaskRow) -> bool:
        """Restrict a row in which all tokens are allowed. False: no token is left, or the row is
        not known."""
        if self._budget is not None and self._budget.next_token is not None:
            allow_only(row, self._budget.next_token)
            return True
        if self._grammar is not None and not self._grammar.fill(row):
            return False
        if self._restriction is not None:
            self._restriction.apply(row)
        if row.any():
            return True
        row.fill(ALL_TOKENS)
        return False
