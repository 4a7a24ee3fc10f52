"""A step plan in the making, and the budget of a step for prompts."""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import Admit, BlockTable, KeepState, Prefill, StepPlan
from radixrt.scheduler.radix.page_allocator import NO_PAGES, Pages
from radixrt.scheduler.step_times import StepShape


class Budget:
    """Tokens and seconds of a step for prompts. What a part spends, the whole spends too.

    >>> step = Budget(512, 0.1)
    >>> part = step.part(0.25)
    >>> part.spend(100, 0.01)
    >>> part.tokens, step.tokens
    (28, 412)
    """

    def __init__(self, tokens: int, seconds: float, whole: "Budget | None" = None) -> None:
        self._tokens = tokens
        self._seconds = seconds
        self._whole = whole

    @property
    def tokens(self) -> int:
        return self._tokens if self._whole is None else min(self._tokens, self._whole.tokens)

    @property
    def seconds(self) -> float:
        return self._seconds if self._whole is None else min(self._seconds, self._whole.seconds)

    @property
    def is_spent(self) -> bool:
        return self.tokens <= 0 or self.seconds <= 0

    def part(self, share: float) -> "Budget":
        """A share of what is left."""
        return Budget(math.ceil(self.tokens * share), self.seconds * share, self)

    def spend(self, tokens: int, seconds: float) -> None:
        self._tokens -= tokens
        self._seconds -= seconds
        if self._whole is not None:
            self._whole.spend(tokens, seconds)


@dataclass(slots=True)
class PlanBuilder:
    """A step plan in the making; see :class:`radixrt.messages.steps.StepPlan` for the fields."""

    shape: StepShape = field(default_factory=lambda: StepShape(0, 0))
    scored: int = 0
    """Prompt tokens with log-probabilities."""
    progress: dict[int, int] = field(default_factory=dict)
    """See :class:`StepInFlight`."""
    chunks: dict[int, int] = field(default_factory=dict)
    """The index in ``prefill`` of the chunk of a slot, by slot."""
    admit: list[Admit] = field(default_factory=list)
    block_tables: list[BlockTable] = field(default_factory=list)
    extend_slots: list[NDArray[np.signedinteger]] = field(default_factory=list)
    extend_pages: list[Pages] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
    keep: list[KeepState] = field(default_factory=list)

    def extend(self, slots: NDArray[np.signedinteger], pages: Pages) -> None:
        if len(pages):
            self.extend_slots.append(slots)
            self.extend_pages.append(pages)

    @property
    def has_work(self) -> bool:
        return self.shape.rows > 0 or bool(self.prefill)

    def seal(self, step_id: int, release: list[int], draft_saving: float) -> StepPlan:
        """The finished plan."""
        slots, pages = _joined(self.extend_slots), _joined(self.extend_pages)
        if (
            len(self.extend_slots) > 1
        ):  # a prompt can get pages twice, and its pages must be adjacent
            order = np.argsort(slots, kind="stable")
            slots, pages = slots[order], pages[order]
        return StepPlan(
            step_id=step_id,
            release=release,
            admit=self.admit,
            block_tables=self.block_tables,
            extend_slots=pack_ids(slots),
            extend_pages=pack_ids(pages),
            prefill=self.prefill,
            keep=self.keep,
            draft_saving=draft_saving,
        )


def _joined(parts: list[NDArray[np.signedinteger]]) -> NDArray[np.signedinteger]:
    return np.concatenate(parts) if parts else NO_PAGES
