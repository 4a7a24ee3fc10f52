"""Drafts from a text that the answer is expected to follow: the tree's continuation, or the
client's prediction.

The answer is followed along the reference token by token. Where it departs, its last tokens are
looked up in the reference, so that a reference with other passages serves again behind each of
them.
"""

from collections.abc import Callable, Sequence

from radixrt.messages.ids import PackedIds, unpack_ids
from radixrt.messages.steps import DraftSources
from radixrt.worker.drafts.drafter import Draft
from radixrt.worker.drafts.suffix_index import SuffixIndex

_MAX_KIND = 3
"""Four tokens that agree and more are one kind of evidence."""


class ReferenceDrafter:
    """One reference a slot.

    Args:
        pick: the packed reference of a sequence.
        begins_answer: the reference begins where the answer does, and not behind the tokens known
            at admission.
    """

    def __init__(
        self, pick: Callable[[DraftSources], PackedIds], *, begins_answer: bool = False
    ) -> None:
        self._pick = pick
        self._begins_answer = begins_answer
        self._followed: dict[int, _Followed] = {}

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        if reference := self._pick(sources):
            seen = num_prompt if self._begins_answer else len(text)
            self._followed[slot] = _Followed(unpack_ids(reference).tolist(), text, seen)

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        followed = self._followed.get(slot)
        return None if followed is None else followed.propose(budget, ahead)

    def release(self, slot: int) -> None:
        self._followed.pop(slot, None)


class _Followed:
    """A reference, and how far a text has followed it."""

    def __init__(self, reference: list[int], text: list[int], seen: int) -> None:
        self._index = SuffixIndex(reference)
        self._text = text
        self._seen = seen
        """Tokens of the text that were looked at."""
        self._place: int | None = 0
        """Place of the reference's token that is expected next; None: the text has departed."""
        self._agreed = 0
        """Tokens by which the text has followed since it departed last."""

    def propose(self, budget: int, ahead: Sequence[int]) -> Draft | None:
        self._follow()
        if self._place is None:
            self._look_up()
        if self._place is None:
            return None
        reference, start = self._index.text, self._place + len(ahead)
        if ahead and reference[self._place : start] != ahead:
            return None
        draft = reference[start : start + budget]
        return Draft(draft, min(self._agreed.bit_length(), _MAX_KIND)) if draft else None

    def _follow(self) -> None:
        text, reference = self._text, self._index.text
        while self._seen < len(text) and self._place is not None:
            if self._place < len(reference) and text[self._seen] == reference[self._place]:
                self._place += 1
                self._agreed += 1
            else:
                self._place = None
            self._seen += 1
        self._seen = len(text)

    def _look_up(self) -> None:
        match = self._index.find(self._text)
        if match is not None and match.length > 1:
            self._place, self._agreed = match.place, match.length
