"""A backend whose answers are known: it says what a function of the prompt says, when the test lets it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence

from radixrt.lang.backends.protocol import Call, ChoiceCall, Piece, Prompt, Score, Scored, Usage


def last_words(prompt: Prompt) -> str:
    """The end of what a call answers."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


class ScriptedBackend:
    """Answers ``answer(prompt)`` in pieces of one character. What it was asked is in :attr:`calls`."""

    name = "The scripted backend"

    def __init__(self, answer: Callable[[str], str] = lambda prompt: f"<{prompt}>") -> None:
        self._answer = answer
        self.calls: list[Call] = []
        self.running = 0
        self.most_running = 0
        self.ended_sessions: list[str] = []
        self.pinned: dict[str, Prompt] = {}
        """By lease."""
        self.unpinned: list[str] = []
        self.room: int | None = None
        """What its cache holds, if it tells."""
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
            usage = Usage(prompt_tokens=len(last_words(call.prompt)) // 4 + 1, completion_tokens=1)
            yield Piece(finish_reason="stop", usage=usage)
        finally:
            self.running -= 1

    async def score(self, call: ChoiceCall) -> Scored:
        """The longer, the likelier; but nothing is as likely behind nothing."""
        return Scored([Score((-1.0 / len(choice),), (0.0,)) for choice in call.choices])

    async def cache_tokens(self) -> int | None:
        return self.room

    async def programs_ended(self, sessions: Sequence[str]) -> None:
        self.ended_sessions += sessions

    async def pin(self, prefix: Prompt, seconds: float) -> str | None:
        lease = f"lease {len(self.pinned)}"
        self.pinned[lease] = prefix
        return lease

    async def unpin(self, lease: str) -> None:
        self.unpinned.append(lease)

    async def close(self) -> None:
        pass
