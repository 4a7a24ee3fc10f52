"""Which remembered conversation does a request go on from, and is it to be remembered itself?

``continue_from`` and ``keep`` of chat and completions. See docs/api.md.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request

from radixrt.api.conversations.store import Conversation, Conversations, Items, Kind
from radixrt.api.openai.protocol import GenerationFields, KeepRequest, PromptRequest
from radixrt.base.errors import RequestError

AnyContinuing = GenerationFields | KeepRequest | PromptRequest


def owner_of(request: Request, cache_salt: str | None) -> bytes:
    """Whose conversations a request may go on from: those of the same key and the same salt."""
    key = request.headers.get("authorization", "").encode()
    salt = (cache_salt or "").encode("utf-8", "surrogatepass")
    return hashlib.blake2b(salt, key=hashlib.blake2b(key, digest_size=32).digest()).digest()


@dataclass(frozen=True)
class Continuation:
    """What a request goes on from."""

    owner: bytes
    source: Conversation | None
    taken: int
    """So many of its messages, or characters."""

    @staticmethod
    def of(
        fields: AnyContinuing, kind: Kind, conversations: Conversations, request: Request
    ) -> "Continuation":
        """Raises:
        RequestError: the fields don't fit each other, or there is no such conversation.
        """
        owner = owner_of(request, fields.cache_salt)
        if fields.continue_from is None:
            if fields.continue_after is not None:
                raise RequestError(
                    "continue_after says how much of a remembered conversation to take, but there is no continue_from.",
                    param="continue_after",
                )
            return Continuation(owner, None, 0)
        source = conversations.find(fields.continue_from, owner)
        if source.kind != kind:
            path = "/v1/completions" if source.kind == "text" else "/v1/chat/completions"
            raise RequestError(
                f"continue_from names what was kept by {path}; go on with it there.",
                param="continue_from",
            )
        return Continuation(owner, source, _taken(fields.continue_after, source))

    @staticmethod
    def of_one_prompt(
        fields: KeepRequest | PromptRequest, conversations: Conversations, request: Request
    ) -> "Continuation":
        """Raises:
        RequestError: there is not exactly one prompt, or there is no such conversation.
        """
        if (fields.messages is None) == (fields.prompt is None):
            raise RequestError("Give either messages or a prompt (a string).", param="messages")
        kind: Kind = "text" if fields.messages is None else "messages"
        return Continuation.of(fields, kind, conversations, request)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As the chat template takes them; none where the request goes on from nothing."""
        found = [] if self.source is None else self.source.first(self.taken)
        assert not isinstance(found, str)
        return found

    @property
    def text(self) -> str:
        found = "" if self.source is None else self.source.first(self.taken)
        assert isinstance(found, str)
        return found


def _taken(given: int | None, source: Conversation) -> int:
    if given is None:
        return source.length
    if not 0 <= given <= source.length:
        unit = "messages" if source.kind == "messages" else "characters"
        raise RequestError(
            f"continue_after must be from 0 to {source.length}, the number of remembered {unit}, not {given}.",
            param="continue_after",
        )
    return given


def is_kept(fields: GenerationFields) -> bool:
    """Whether the conversation is to be remembered.

    Raises:
        RequestError: the request chose its id.
    """
    if fields.keep and (fields.rid is not None or fields.request_id is not None):
        raise RequestError(
            "keep needs an id that nobody can guess, so the request can't choose its own: leave rid out.",
            param="keep",
        )
    return bool(fields.keep)


class Keeper:
    """Gathers one answer, and has the conversation remembered when it has ended."""

    def __init__(
        self,
        conversations: Conversations,
        conversation_id: str,
        continuation: Continuation,
        new: Items,
        continues_last_message: bool = False,
    ) -> None:
        """
        Args:
            new: what the request brought, as it is to be remembered.
            continues_last_message: the answer is a part of the last message there was before it.
        """
        self._conversations = conversations
        self._id = conversation_id
        self._continuation = continuation
        self._new = new
        self._continues_last_message = continues_last_message
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []

    def add(self, text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()) -> None:
        """
        Args:
            calls: of tools, or pieces of them, as the client gets them.
        """
        self._content.append(text)
        self._reasoning.append(reasoning)
        for call in calls:
            if "id" in call:
                self._tool_calls.append(
                    {"id": call["id"], "type": "function", "function": dict(call["function"])}
                )
            else:
                self._tool_calls[-1]["function"]["arguments"] += call["function"]["arguments"]

    def end(self, finish_reason: str | None) -> bool:
        """The answer has ended. Returns whether the conversation is remembered."""
        if finish_reason in (None, "abort"):
            return False
        if isinstance(self._new, str):
            return self._keep(self._new + "".join(self._content), self._continuation.taken)
        message = self._message()
        if message is None:
            return False
        if not self._continues_last_message:
            return self._keep([*self._new, message], self._continuation.taken)
        taken = self._continuation.taken
        if self._new:
            *before, last = self._new
        else:
            before, last, taken = [], self._continuation.messages[-1], taken - 1
        whole = {**last, **message, "content": last["content"] + message["content"]}
        return self._keep([*before, whole], taken)

    def _keep(self, items: Items, taken: int) -> bool:
        continuation = self._continuation
        return self._conversations.keep(
            self._id, continuation.owner, items, continuation.source, taken
        )

    def _message(self) -> dict[str, Any] | None:
        """The answer as the chat template takes it; None if it can't: a call was cut off in the middle."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        for call in self._tool_calls:
            try:
                call["function"]["arguments"] = msgspec.json.decode(
                    call["function"]["arguments"] or "{}"
                )
            except msgspec.DecodeError:
                return None
        if self._tool_calls:
            message["tool_calls"] = self._tool_calls
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        return message
