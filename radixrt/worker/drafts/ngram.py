"""Drafts from the sequence itself: what followed the last tokens the last time that they occurred
in prompt or answer.

This is prompt lookup (Saxena, 2023). Answers from documents, edits of code and JSON that repeats
its input copy long stretches of their prompts. Where such a stretch ends, the answer turns to
something else, often in the same way (:mod:`radixrt.worker.drafts.copy_exits`).
"""

from collections.abc import Sequence

from radixrt.messages.steps import DraftSources
from radixrt.worker.drafts.copy_exits import CopyExits, CopyExitsBySalt
from radixrt.worker.drafts.drafter import Draft
from radixrt.worker.drafts.suffix_index import SuffixIndex, ending_of

MAX_INDEXED = 32768
"""Tokens of a prompt that are indexed: its last ones. That takes about 12 ms, and the other
sequences wait."""

_KIND_OF_EXITS = 16
"""The first kind of evidence of an exit, above the kinds of matches."""


class NgramDrafter:
    """One index a slot."""

    def __init__(self) -> None:
        self._slots: dict[int, _Copying] = {}
        self._exits = CopyExitsBySalt()

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        index = SuffixIndex(text, max(0, len(text) - MAX_INDEXED))
        index.catch_up()
        self._slots[slot] = _Copying(index, self._exits.for_salt(sources.salt))

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        return self._slots[slot].propose(budget, ahead)

    def release(self, slot: int) -> None:
        if (one := self._slots.pop(slot, None)) is not None:
            one.look_back()


class _Copying:
    """A text that copies its own beginning."""

    def __init__(self, index: SuffixIndex, exits: CopyExits) -> None:
        self._index = index
        self._exits = exits
        self._expected: list[int] = []
        """Tokens that followed the last match."""
        self._seen = 0
        """Length of the text at that time."""
        self._agreed = 0
        """Tokens of that match."""

    def propose(self, budget: int, ahead: Sequence[int]) -> Draft | None:
        text = self._index.text
        if not ahead:
            self.look_back()
        match = self._index.find(ending_of(text, ahead))
        if match is None:
            return None
        draft = text[match.place : match.place + budget]
        if not ahead:
            self._expected, self._seen, self._agreed = draft, len(text), match.length
        end = self._exits.first_in(draft)
        if end == 0:
            instead = self._exits.by_token[draft[0]]
            return Draft([instead.token], _KIND_OF_EXITS + instead.trust)
        if end is not None:
            return Draft(draft[:end], match.kind)
        while len(draft) < budget and not ahead:
            # the text repeats itself to its end, so the draft goes on with itself
            draft += draft[: budget - len(draft)]
        return Draft(draft, match.kind)

    def look_back(self) -> None:
        """Learn from the tokens that have come since the last match."""
        text = self._index.text
        for place, expected in enumerate(self._expected[: len(text) - self._seen]):
            token = text[self._seen + place]
            self._exits.observe(expected, token, copies=self._agreed + place > 1)
            if token != expected:
                break
        self._expected = []
