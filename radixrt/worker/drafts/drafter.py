"""The interface of all drafters: a source of tokens that may come next in a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from radixrt.messages.steps import DraftSources


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next. They are verified in one step; those that are not drawn leave no trace."""

    token_ids: list[int]
    kind: int = 0
    """Of the evidence for them, a small number. The chance of acceptance is learned for each drafter and kind."""


class Drafter(Protocol):
    """One source of drafts. Every rank has the same, so a draft depends on tokens alone and on no clock."""

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        """Take a sequence into a free slot.

        Args:
            slot: its slot.
            text: its tokens, prompt and answer; it grows while the sequence runs.
            num_prompt: of these, the tokens of the prompt.
            sources: texts of the request.
        """

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        """Up to ``budget`` tokens to follow the slot's text; None: there is no guess.

        Args:
            ahead: draft tokens that stand between the text and these. A drafter that can't go on behind a draft gives None.
        """

    def release(self, slot: int) -> None:
        """Forget the sequence of a slot. Its text is complete."""
