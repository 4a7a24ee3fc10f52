"""How many runs of a batch fit into the server's cache side by side? As many as find there what they come back to.

Runs that together need more than the cache holds evict from each other what they need at their next call. So a run enters
when what is to be kept for all that hold room fits: what their first prompts have in common, counted once, and, if runs of
this batch make one call after another, all else that they have sent and got. What a call has for itself, if nobody comes
back to it, takes no room here; the server sees to it. Calls that are sent side by side need their prefix together, so what
the branches of one run have in common counts as well. One run may always go on.

A run holds room while it has calls under way. While it rests, in a slow tool say, another may enter: an idle server would
cost more than the prefix that is to be computed again.
"""

from collections.abc import Sequence

from radixrt.base.common_prefix import common_prefix_length
from radixrt.lang.backends.protocol import Usage
from radixrt.lang.run_inside import RunInside

USED_SHARE = 0.9
"""Of the cache: pages are filled in part, and something else may run."""
FIRST_TOKENS_PER_CHARACTER = 0.35
"""Until answers tell; low for code, high for English."""
FIRST_GROWTH = 0.5
"""How much a run adds to its first prompts, as a share of these, until one has ended and told."""


class Room:
    """The runs inside, by what they have sent."""

    def __init__(self, cache_tokens: int | None) -> None:
        """
        Args:
            cache_tokens: what the cache can hold; None: nobody knows, and every run fits.
        """
        self._capacity = None if cache_tokens is None else cache_tokens * USED_SHARE
        self.inside: dict[str, RunInside] = {}
        """By the ids of the runs."""
        self._characters = 0
        self._tokens = 0
        self._growths: list[float] = []
        """Of ended runs: tokens beyond their first prompts."""
        self._some_come_back = False
        """A run has made a call after one that was answered."""

    def fits(self, prompts: Sequence[str]) -> bool:
        """Whether a run that begins with these prompts, side by side, finds room."""
        holders = [run for run in self.inside.values() if not run.rests]
        if self._capacity is None or not holders:
            return True
        if self._growths and not self._some_come_back:
            sent = [text for run in holders for text in run.texts]
            kept = common_length([*sent, *prompts]) * self._tokens_per_character
        else:
            firsts = [text for run in holders for text in run.first_texts]
            kept = distinct_length([*firsts, *prompts]) * self._tokens_per_character
            kept += (len(holders) + 1) * self._growth(prompts)
        return kept <= self._capacity

    def enter(self, run_id: str, run: RunInside) -> None:
        self.inside[run_id] = run

    def sends(self, run_id: str, prompt: str) -> None:
        """A run inside makes a further call."""
        run = self.inside[run_id]
        run.later_texts.append(prompt)
        self._some_come_back |= run.was_answered

    def answered(self, prompt: str, usage: Usage) -> None:
        """A call has ended; where it tells, the next guesses are better."""
        if usage.prompt_tokens:
            self._characters += len(prompt)
            self._tokens += usage.prompt_tokens

    def leave(self, run_id: str) -> None:
        """A run inside has ended."""
        run = self.inside.pop(run_id)
        if not all(usage.prompt_tokens for usage in run.usages):
            return  # some of its calls did not tell: they failed, say
        answered = sum(usage.completion_tokens for usage in run.usages)
        later = distinct_length(run.texts) - distinct_length(run.first_texts)
        self._growths.append(max(later * self._tokens_per_character, 0) + answered)

    @property
    def _tokens_per_character(self) -> float:
        return self._tokens / self._characters if self._tokens else FIRST_TOKENS_PER_CHARACTER

    def _growth(self, prompts: Sequence[str]) -> float:
        if self._growths:
            return sum(self._growths) / len(self._growths)
        return distinct_length(prompts) * self._tokens_per_character * FIRST_GROWTH


def distinct_length(prompts: Sequence[str]) -> int:
    """Characters of prompts, with what several begin with counted once: those of their radix tree."""
    ordered = sorted(prompts)
    shared = sum(map(common_prefix_length, ordered, ordered[1:]))
    return sum(map(len, ordered)) - shared


def common_length(prompts: Sequence[str]) -> int:
    """Characters that at least two of the prompts begin with: those of their radix tree without its leaves."""
    ordered = sorted(prompts)
    shared = list(map(common_prefix_length, ordered, ordered[1:]))
    return sum(shared) - sum(map(min, shared, shared[1:]))
