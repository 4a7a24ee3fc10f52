"""A step plan in the making."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import Admit, BlockTable, Prefill, StepPlan
from radixrt.scheduler.radix.page_allocator import Pages


@dataclass(slots=True)
class PlanDraft:
    """Collects what changes; see :class:`radixrt.messages.steps.StepPlan` for what it means."""

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


def _pack_all(parts: list[NDArray[np.signedinteger]]) -> bytes:
    return pack_ids(np.concatenate(parts)) if parts else b""
