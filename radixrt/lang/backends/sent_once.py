"""How does a prompt reach a radixrt server without being sent twice? What it keeps is referred to; what is long goes ahead.

A long beginning that many calls share, such as that of forks or of a batch, is sent before the first of them, and the
others wait until it is there: a small answer, beside what computing so much text takes.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from radixrt.lang.backends.http import HttpClient
from radixrt.lang.backends.kept_prompts import KeptPrefix, KeptPrompts, is_long
from radixrt.lang.backends.protocol import Prompt
from radixrt.lang.errors import BackendError
from radixrt.lang.prefixes import num_chars, num_shared

SENT_AHEAD_CHARS = 8192
"""A prompt with at least so much that the server does not keep is sent ahead of the call."""
ENDPOINT = "/v1/conversations"


class SentOnce:
    """What one server was sent. Lives in the runtime's event loop."""

    def __init__(self, http: HttpClient, offers: Callable[[str], Awaitable[bool]]) -> None:
        """
        Args:
            offers: whether the server has an endpoint.
        """
        self._http = http
        self._offers = offers
        self.prompts = KeptPrompts()
        """What is known to be there."""
        self._on_their_way: list[tuple[Prompt, asyncio.Event]] = []

    def known(self, prompt: Prompt) -> KeptPrefix | None:
        """What the server keeps of a prompt, as far as that is known."""
        return self.prompts.longest(prompt) if is_long(prompt) else None

    async def kept(self, prompt: Prompt) -> KeptPrefix | None:
        """The same, once all that is long of it is there."""
        if not is_long(prompt):
            return None
        while True:
            kept = self.prompts.longest(prompt)
            start = 0 if kept is None else kept.length
            if num_chars(prompt[start:]) < SENT_AHEAD_CHARS or not await self._offers(ENDPOINT):
                return kept
            if (arrival := self._arrival_of(prompt, start)) is None:
                return await self._send_ahead(prompt, kept)
            await arrival.wait()

    def _arrival_of(self, prompt: Prompt, start: int) -> asyncio.Event | None:
        """Of a prompt on its way that holds a long part of this one beyond ``start``."""
        for other, arrival in self._on_their_way:
            shared = num_shared(prompt, other)
            if shared > start and num_chars(prompt[start:shared]) >= SENT_AHEAD_CHARS:
                return arrival
        return None

    async def _send_ahead(self, prompt: Prompt, kept: KeptPrefix | None) -> KeptPrefix | None:
        """Have the server keep all of a prompt; what it keeps then."""
        arrival = asyncio.Event()
        on_its_way = (prompt, arrival)
        self._on_their_way.append(on_its_way)
        try:
            answer = await self._http.post(ENDPOINT, prompt_fields(prompt, kept))
            if answer["kept"]:
                self.prompts.kept(answer["id"], prompt)
                return KeptPrefix(answer["id"], len(prompt))
        except (BackendError, KeyError, TypeError):
            if kept is not None:
                self.prompts.gone(kept.conversation)
            return None  # the call itself sends all, and says what is wrong
        finally:
            self._on_their_way.remove(on_its_way)
            arrival.set()
        return kept


def prompt_fields(prompt: Prompt, kept: KeptPrefix | None) -> dict[str, Any]:
    """What a request says for a prompt of which a server keeps the beginning."""
    name = "prompt" if isinstance(prompt, str) else "messages"
    if kept is None:
        return {name: prompt}
    return {
        name: prompt[kept.length :],
        "continue_from": kept.conversation,
        "continue_after": kept.length,
    }
