"""Prompts that arrive in pieces, and the work of computing them ahead.

What no later piece changes is computed while the rest arrives, as work for idle times: one request
to the engine at a time for each prompt, always of all pieces so far. Any request may name a prompt
as the conversation that it goes on from. A prompt that is not used any more ends after a time, and
its KV is evicted first.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from radixrt.api.conversations.store import OVERHEAD_BYTES, Items, KeptConversation
from radixrt.base.errors import EngineDiedError, RequestError, wrong
from radixrt.base.sampling_params import PREFILL_ONLY
from radixrt.messages.requests import (
    ChatPrompt,
    GenerateRequest,
    RequestOptions,
    TextPrompt,
)

log = logging.getLogger(__name__)

TTL_S = 300.0
"""Seconds without a piece or a use after which a prompt ends."""
MAX_PROMPTS = 64
"""Open prompts of one API key at a time."""
MAX_BYTES = 32 << 20
"""Text of the open prompts of one API key."""

Compute = Callable[[GenerateRequest], Awaitable[object]]
Release = Callable[[RequestOptions], Awaitable[object]]
"""Lets the KV of a session be evicted first."""


@dataclass(eq=False)
class OpenPrompt:
    """One prompt, as far as it has arrived."""

    id: str
    access_key: bytes
    """Only requests with the same key may add to it or name it."""
    begin: TextPrompt | ChatPrompt
    """The first piece, with the settings of the template."""
    options: RequestOptions
    """What the work ahead is done with; its session is the prompt's own."""
    items: Items
    """All pieces."""
    num_bytes: int
    pieces: int = 1
    is_over: bool = False
    computing: asyncio.Task[None] | None = None
    expires: asyncio.TimerHandle | None = None

    @property
    def tenant(self) -> str:
        return self.options.tenant.name

    def prompt(self) -> TextPrompt | ChatPrompt:
        """All of it."""
        if isinstance(self.begin, TextPrompt):
            assert isinstance(self.items, str)
            return replace(self.begin, text=self.items)
        assert not isinstance(self.items, str)
        return replace(self.begin, messages=[*self.items])

    def add(self, piece: Items) -> None:
        """Add messages, or text: to a chat, text is that of its last message.

        Raises:
            RequestError: the last message has no text, or messages are added to a text.
        """
        if isinstance(self.items, str):
            if not isinstance(piece, str):
                raise RequestError("This prompt is a text; add a text to it.", param="messages")
            self.items += piece
        elif not isinstance(piece, str):
            self.items = [*self.items, *piece]
        else:
            last = self.items[-1]
            if not isinstance(content := last.get("content"), str):
                raise wrong(
                    "text", "goes on with the last message, whose content is no text; add a message"
                )
            self.items = [*self.items[:-1], {**last, "content": content + piece}]
        self.pieces += 1

    def kept(self) -> KeptConversation:
        """The prompt as a conversation to go on from."""
        is_text = isinstance(self.items, str)
        own = (
            self.items.encode() if isinstance(self.items, str) else msgspec.json.encode(self.items)
        )
        return KeptConversation(
            id=self.id,
            access_key=self.access_key,
            kind="text" if is_text else "messages",
            parent=None,
            taken=0,
            own=own,
            length=len(self.items),
            used_at=0.0,
        )


@dataclass
class OpenPrompts:
    """The open prompts of one model."""

    compute: Compute
    release: Release
    ttl_s: float = TTL_S
    _open: dict[str, OpenPrompt] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        prompt_id: str,
        access_key: bytes,
        begin: TextPrompt | ChatPrompt,
        options: RequestOptions,
    ) -> OpenPrompt:
        """Begin a prompt with its first piece, and compute what is settled of it.

        Args:
            options: those of the requests that will name the prompt.

        Raises:
            RequestError: the key has too many open prompts, or too much text in them.
        """
        items: Items = begin.text if isinstance(begin, TextPrompt) else begin.messages
        options = replace(
            options,
            sampling=PREFILL_ONLY,
            idle="arriving",
            deadline=None,
            progress=False,
            shares_answers=False,
            cache_hints=replace(options.cache_hints, session=f"{access_key.hex()} {prompt_id}"),
        )
        opened = OpenPrompt(prompt_id, access_key, begin, options, items, _size(items))
        self._check_room(opened.tenant, opened.num_bytes, num_new=1)
        self._open[prompt_id] = opened
        self._use(opened)
        self._compute_ahead(opened)
        return opened

    def add(self, prompt_id: str, access_key: bytes, piece: Items) -> OpenPrompt:
        """Add a piece.

        Raises:
            RequestError: there is no such prompt, or it takes no such piece or no more.
        """
        opened = self.find(prompt_id, access_key)
        size = _size(piece)
        self._check_room(opened.tenant, size)
        opened.add(piece)
        opened.num_bytes += size
        self._use(opened)
        self._compute_ahead(opened)
        return opened

    def kept(self, prompt_id: str, access_key: bytes) -> KeptConversation | None:
        """The prompt as a conversation to go on from; None: there is no such prompt. What is being
        computed ahead of it is not waited for."""
        opened = self._open.get(prompt_id)
        if opened is None or opened.access_key != access_key:
            return None
        self._use(opened)
        return opened.kept()

    def close(self, prompt_id: str, access_key: bytes, *, give_back: bool) -> None:
        """End a prompt.

        Args:
            give_back: its KV is evicted first: it was abandoned.

        Raises:
            RequestError: there is no such prompt.
        """
        self._end(self.find(prompt_id, access_key), give_back)

    def find(self, prompt_id: str, access_key: bytes) -> OpenPrompt:
        """
        Raises:
            RequestError: there is no such prompt, or it was opened with another key.
        """
        opened = self._open.get(prompt_id)
        if opened is None or opened.access_key != access_key:
            raise RequestError(
                "There is no such prompt, or not any more: open one, and send its pieces again.",
                status=404,
                param="prompt_id",
                code="prompt_gone",
            )
        return opened

    def _check_room(self, tenant: str, num_bytes: int, num_new: int = 0) -> None:
        own = [opened for opened in self._open.values() if opened.tenant == tenant]
        size = sum(opened.num_bytes for opened in own) + num_bytes
        if len(own) + num_new > MAX_PROMPTS or size > MAX_BYTES:
            raise RequestError(
                f"The API key has {len(own)} open prompts; all together may be {MAX_PROMPTS}, with "
                f"{MAX_BYTES >> 20} MiB. Commit or delete some.",
                status=429,
                code="too_many_prompts",
            )

    def _use(self, opened: OpenPrompt) -> None:
        if opened.expires is not None:
            opened.expires.cancel()
        loop = asyncio.get_running_loop()
        opened.expires = loop.call_later(self.ttl_s, self._end, opened, True)

    def _end(self, opened: OpenPrompt, give_back: bool) -> None:
        opened.is_over = True
        self._open.pop(opened.id, None)
        if opened.expires is not None:
            opened.expires.cancel()
        computing = opened.computing
        if computing is not None:
            computing.cancel()
        if give_back:
            opened.computing = asyncio.get_running_loop().create_task(
                self._give_back(opened, computing)
            )

    async def _give_back(self, opened: OpenPrompt, computing: asyncio.Task[None] | None) -> None:
        if computing is not None:
            await asyncio.wait([computing])
        with contextlib.suppress(RequestError, EngineDiedError):
            await self.release(opened.options)

    def _compute_ahead(self, opened: OpenPrompt) -> None:
        if opened.computing is None or opened.computing.done():
            loop = asyncio.get_running_loop()
            opened.computing = loop.create_task(self._compute_all(opened))

    async def _compute_all(self, opened: OpenPrompt) -> None:
        """Compute what is settled, until no more pieces come."""
        pieces = 0
        while not opened.is_over and pieces != opened.pieces:
            pieces = opened.pieces
            request = GenerateRequest(
                request_id=f"{opened.id}.{pieces}",
                prompt=opened.prompt(),
                options=opened.options,
                growth="text",
            )
            try:
                await self.compute(request)
            except (RequestError, EngineDiedError) as error:
                log.debug("Nothing was computed ahead of %s: %s", opened.id, error)


def _size(items: Items) -> int:
    """Memory of pieces in bytes, about."""
    if isinstance(items, str):
        return len(items.encode("utf-8", "surrogatepass")) + OVERHEAD_BYTES
    return len(msgspec.json.encode(items)) + OVERHEAD_BYTES
