"""How many runs of a batch fit into the server's cache side by side? As many as find there what they come back to.

Runs that together need more than the cache holds evict from each other what they need at their next call. So a run enters
when what is to be kept for all inside fits: what their first prompts have in common, counted once, and, if runs of this
batch make several calls, all else that they have sent and got. What a single call has for itself nobody comes back to; the
server sees to the room for it. One run may always go on.
"""

from collections.abc import Sequence

from radixrt.lang.backends.protocol import Usage
from radixrt.lang.batch_order import shared_length

USED_SHARE = 0.9
"""Of the cache: pages are filled in part, and something else may run."""
FIRST_TOKENS_PER_CHARACTER = 0.35
"""Until answers tell; low for code, high for English."""
FIRST_GROWTH = 0.5
"""How much a run adds to its first prompt, as a share of that, until one has ended and told."""


class Room:
    """The runs inside, by what they have sent."""

    def __init__(self, cache_tokens: int | None) -> None:
        """
        Args:
            cache_tokens: what the cache can hold; None: nobody knows, and every run fits.
        """
        self._capacity = None if cache_tokens is None else cache_tokens * USED_SHARE
        self._sent: dict[str, list[str]] = {}
        """The prompts of each run inside, as texts."""
        self._characters = 0
        self._tokens = 0
        self._growths: list[float] = []
        """Of ended runs: tokens beyond the first prompt."""
        self._some_come_back = False
        """A run has made a second call."""

    def fits(self, prompt: str) -> bool:
        """Whether a run that begins with this prompt finds room."""
        if self._capacity is None or not self._sent:
            return True
        firsts = [prompts[0] for prompts in self._sent.values()] + [prompt]
        if self._some_come_back or not self._growths:
            kept = distinct_length(firsts) * self._tokens_per_character
            kept += len(firsts) * self._growth(prompt)
        else:
            kept = common_length(firsts) * self._tokens_per_character
        return kept <= self._capacity

    def enter(self, run_id: str, prompt: str) -> None:
        self._sent[run_id] = [prompt]

    def sends(self, run_id: str, prompt: str) -> None:
        """A run inside makes a further call."""
        if self._capacity is not None and run_id in self._sent:
            self._sent[run_id].append(prompt)
            self._some_come_back = True

    def leave(self, run_id: str, usages: Sequence[Usage]) -> None:
        """
        Args:
            usages: of all its calls, answered or not.
        """
        prompts = self._sent.pop(run_id, [])
        if self._capacity is None or not prompts or not all(u.prompt_tokens for u in usages):
            return  # some of its calls did not tell: selects, or failed ones
        self._characters += sum(map(len, prompts))
        self._tokens += sum(usage.prompt_tokens for usage in usages)
        answered = sum(usage.completion_tokens for usage in usages)
        later = distinct_length(prompts) - len(prompts[0])
        self._growths.append(max(later * self._tokens_per_character, 0) + answered)

    @property
    def _tokens_per_character(self) -> float:
        return self._tokens / self._characters if self._tokens else FIRST_TOKENS_PER_CHARACTER

    def _growth(self, prompt: str) -> float:
        if self._growths:
            return sum(self._growths) / len(self._growths)
        return len(prompt) * self._tokens_per_character * FIRST_GROWTH


def distinct_length(prompts: Sequence[str]) -> int:
    """Characters of prompts, with what several begin with counted once: those of their radix tree."""
    ordered = sorted(prompts)
    shared = sum(map(shared_length, ordered, ordered[1:]))
    return sum(map(len, ordered)) - shared


def common_length(prompts: Sequence[str]) -> int:
    """Characters that at least two of the prompts begin with: those of their radix tree without its leaves."""
    ordered = sorted(prompts)
    shared = list(map(shared_length, ordered, ordered[1:]))
    return sum(shared) - sum(map(min, shared, shared[1:]))
