"""Drafts from the sequence itself: what followed the last tokens the last time that they occurred in prompt or answer.

This is prompt lookup (Saxena, 2023). Answers from documents, edits of code and JSON that repeats its input copy long
stretches of their prompts.
"""

from radixrt.messages.steps import DraftSources
from radixrt.worker.drafts.drafter import Draft
from radixrt.worker.drafts.suffix_index import SuffixIndex

MOST_INDEXED = 32768
"""Tokens of a prompt that are indexed: its last ones. That takes about 10 ms, and the other sequences wait."""


class NgramDrafter:
    """One index a slot, made when its first token is drafted."""

    def __init__(self) -> None:
        self._indexes: dict[int, SuffixIndex] = {}

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        self._indexes[slot] = SuffixIndex(text, max(0, len(text) - MOST_INDEXED))

    def propose(self, slot: int, budget: int) -> Draft | None:
        index = self._indexes[slot]
        text = index.text
        match = index.find(text)
        if match is None:
            return None
        draft = text[match.place : match.place + budget]
        while (
            len(draft) < budget
        ):  # the text repeats itself to its end, so the draft goes on with itself
            draft += draft[: budget - len(draft)]
        return Draft(draft, match.length)

    def release(self, slot: int) -> None:
        self._indexes.pop(slot, None)
