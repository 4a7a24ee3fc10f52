"""A backend whose answers are known: it says what a function of the prompt says, when the test lets
it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

from radixrt.base.common_prefix import common_prefix_length
from radixrt.lang.backends.protocol import (
    CachedPrompt,
    Call,
    ChoiceCall,
    Piece,
    Prompt,
    Score,
    Scored,
    Usage,
)


def last_words(prompt: Prompt) -> str:
    """The end of what a call answers."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


class ScriptedBackend:
    """Answers ``answer(prompt)`` in pieces of one character. What it was asked is in
    :attr:`calls`."""

    name = "The scripted backend"

    def __init__(self, answer: Callable[[str], str] = lambda prompt: f"<{prompt}>") -> None:
        self._answer = answer
        self.calls: list[Call] = []
        self.running = 0
        self.most_running = 0
        self.capacity: int | None = None
        """Tokens that its cache holds, if it tells."""
        self.caches_prefixes = False
        """Of a prompt, only what no earlier prompt began with is computed."""
        self.ahead: list[Prompt] = []
        """Prompts that it was to compute in idle time."""
        self.num_matches = 0
        """Calls about the cache."""
        self._prompts: list[str] = []
        self._held = False
        self._lock = threading.Lock()

    def hold(self) -> None:
        """No answer ends from now on."""
        self._held = True

    def release(self) -> None:
        self._held = False

    async def generate(self, call: Call) -> AsyncGenerator[Piece, None]:
        self.calls.append(call)
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            text = self._answer(last_words(call.prompt))
            for index in range(call.n):
                for character in text if index == 0 else f"{text}{index}":
                    yield Piece(index=index, text=character)
                    await asyncio.sleep(0)
            while self._held:
                await asyncio.sleep(0.005)
            yield Piece(finish_reason="stop", usage=self._usage(last_words(call.prompt)))
        finally:
            self.running -= 1

    async def score(self, call: ChoiceCall) -> Scored:
        """The longer, the likelier; but nothing is as likely behind nothing."""
        return Scored([Score((-1.0 / len(choice),), (0.0,)) for choice in call.choices])

    async def cache_tokens(self) -> int | None:
        return self.capacity

    async def compute_ahead(self, prompt: Prompt) -> None:
        self.ahead.append(prompt)

    async def match_cache(self, prompts: Sequence[Prompt]) -> list[CachedPrompt] | None:
        self.num_matches += 1
        return [self._cached(last_words(one)) for one in prompts] if self.caches_prefixes else None

    def _usage(self, prompt: str) -> Usage:
        """A token for every four characters."""
        cached = self._cached(prompt)
        self._prompts.append(prompt)
        return Usage(
            prompt_tokens=cached.prompt_tokens,
            cached_tokens=cached.cached_tokens if self.caches_prefixes else 0,
            completion_tokens=1,
        )

    def _cached(self, prompt: str) -> CachedPrompt:
        shared = [common_prefix_length(prompt, earlier) for earlier in self._prompts]
        return CachedPrompt(
            prompt_tokens=len(prompt) // 4 + 1, cached_tokens=max(shared, default=0) // 4
        )
