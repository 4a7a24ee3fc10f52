"""The interface of all drafters, which are sources of tokens that may come next; and grammars as
one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from radixrt.messages.steps import DraftSources


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next. They are verified in one step; those that are not drawn leave no
    trace."""

    token_ids: list[int]
    kind: int = 0
    """A small number for the kind of evidence. The chance of acceptance is learned for each drafter
    and kind."""


class Drafter(Protocol):
    """One source of drafts. Every rank has the same, so a draft depends on tokens alone and on no
    clock."""

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
            ahead: draft tokens that stand between the text and these. A drafter that can't go on
                behind a draft gives None.
        """

    def release(self, slot: int) -> None:
        """Forget the sequence of a slot. Its text is complete."""


class GrammarDrafter:
    """Drafts the tokens that a grammar forces, where they may not be taken without being sampled.

    Where they may, jump-forward takes them (:mod:`radixrt.worker.sampling.matchers`): a forced
    token needs no verification, and its row needs no logits. With log-probabilities, or lists of
    allowed tokens, it must be sampled all the same.

    Args:
        forced: the tokens that must follow in a slot and can not be jumped over.
    """

    def __init__(self, forced: Callable[[int], list[int]]) -> None:
        self._forced = forced

    def admit(self, slot: int, text: list[int], num_prompt: int, sources: DraftSources) -> None:
        pass

    def propose(self, slot: int, budget: int, ahead: Sequence[int] = ()) -> Draft | None:
        tokens = [] if ahead else self._forced(slot)
        return Draft(tokens[:budget]) if tokens else None

    def release(self, slot: int) -> None:
        pass
