"""Drafts from the last answers under the same cache salt, whatever their prompts.

Answers of one client share formulas, templates and JSON. A pool never serves another salt, because
what is drafted can be learned from the time of an answer (arXiv 2411.01076 extracts the contents of
shared stores).
"""

from collections import OrderedDict
from collections.abc import Sequence

from radixrt.messages.steps import DraftSources
from radixrt.worker.drafts.drafter import Draft
from radixrt.worker.drafts.suffix_index import SEPARATOR, SuffixIndex, ending_of

MAX_TOKENS = 8192
"""Tokens of the answers of one salt; of more, the older half is dropped."""

MAX_SALTS = 32
"""Salts that have a pool: those used last. All pools together take at most some 55 MB."""

_CONTEXT = 2
"""Tokens before an answer that are kept with it, so that its beginning can be found."""


class PoolDrafter:
    """One pool a salt."""

    def __init__(self) -> None:
        self._pools: OrderedDict[str, SuffixIndex] = OrderedDict()
        self._slots: dict[int, tuple[str, list[int], int]] = {}
        """Salt, text, and tokens of the prompt."""

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        if sources.salt is not None:
            self._slots[slot] = sources.salt, text, num_prompt

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        if slot not in self._slots:
            return None
        salt, text, _ = self._slots[slot]
        pool = self._pools.get(salt)
        if pool is None or (match := pool.find(ending_of(text, ahead))) is None:
            return None
        draft = pool.text[match.place : match.place + budget]
        if SEPARATOR in draft:
            del draft[draft.index(SEPARATOR) :]
        return Draft(draft, match.kind) if draft else None

    def release(self, slot: int) -> None:
        """Add the answer of a slot to its pool."""
        salt, text, num_prompt = self._slots.pop(slot, ("", [], 0))
        if len(text) <= num_prompt:
            return
        new = text[max(0, num_prompt - _CONTEXT) :][-MAX_TOKENS // 2 :]
        pool = self._pools.pop(salt, None) or SuffixIndex([])
        kept = pool.text
        if len(kept) + len(new) >= MAX_TOKENS:
            kept = kept[-MAX_TOKENS // 2 + len(new) :] if len(new) < MAX_TOKENS // 2 else []
            pool = SuffixIndex(kept)
        kept += [SEPARATOR, *new]
        self._pools[salt] = pool
        if len(self._pools) > MAX_SALTS:
            self._pools.popitem(last=False)
