"""Drafts the tokens that a grammar forces, where they may not be taken without being sampled.

Where they may, jump-forward takes them (:mod:`radixrt.worker.sampling.matchers`): a forced token needs no verification, and
its row needs no logits. With log-probabilities, or lists of allowed tokens, it must be sampled all the same.
"""

from collections.abc import Callable, Sequence

from radixrt.messages.steps import DraftSources
from radixrt.worker.drafts.drafter import Draft


class GrammarDrafter:
    """
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
