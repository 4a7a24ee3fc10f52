"""Continues and records kept conversations: ``continue_from``, ``keep`` and ``/v1/conversations``.

See docs/api.md.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from radixrt.api.conversations.store import ConversationStore, Items, KeptConversation, Kind
from radixrt.api.http.endpoints import Endpoints
from radixrt.api.http.events import json_response
from radixrt.api.http.keys import caller_of
from radixrt.api.http.middleware import new_id
from radixrt.api.requests.messages import to_template_messages
from radixrt.api.requests.protocol import GenerationFields, KeepRequest, PromptRequest
from radixrt.api.state import ServerState
from radixrt.base.errors import RequestError

AnyContinuing = GenerationFields | KeepRequest | PromptRequest


def access_key_of(request: Request, cache_salt: str | None) -> bytes:
    """A digest of caller and cache salt. A request may go on from conversations with the same
    one."""
    caller = caller_of(request)
    client = caller.tenant.name.encode() or caller.access
    salt = (cache_salt or "").encode("utf-8", "surrogatepass")
    return hashlib.blake2b(salt, key=hashlib.blake2b(client, digest_size=32).digest()).digest()


@dataclass(frozen=True)
class Continuation:
    """The beginning of a kept conversation that a request goes on from, or nothing."""

    access_key: bytes
    source: KeptConversation | None
    taken: int
    """Number of its messages, or characters."""

    @staticmethod
    def find(
        fields: AnyContinuing, kind: Kind, conversations: ConversationStore, request: Request
    ) -> "Continuation":
        """Raises:
        RequestError: the fields don't fit each other, or there is no such conversation.
        """
        access_key = access_key_of(request, fields.cache_salt)
        if fields.continue_from is None:
            if fields.continue_after is not None:
                raise RequestError(
                    "continue_after is the length of a kept conversation to continue, but there is no continue_from.",
                    param="continue_after",
                )
            return Continuation(access_key, None, 0)
        source = conversations.find(fields.continue_from, access_key)
        if source.kind != kind:
            path = "/v1/completions" if source.kind == "text" else "/v1/chat/completions"
            raise RequestError(
                f"continue_from names a conversation that was kept by {path}; continue it there.",
                param="continue_from",
            )
        return Continuation(access_key, source, _taken(fields.continue_after, source))

    @staticmethod
    def find_one_prompt(
        fields: KeepRequest | PromptRequest, conversations: ConversationStore, request: Request
    ) -> "Continuation":
        """Raises:
        RequestError: there is not exactly one prompt, or there is no such conversation.
        """
        if (fields.messages is None) == (fields.prompt is None):
            raise RequestError("Give either messages or a prompt (a string).", param="messages")
        kind: Kind = "text" if fields.messages is None else "messages"
        return Continuation.find(fields, kind, conversations, request)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages that it takes, for the chat template; none where it goes on from nothing."""
        found = [] if self.source is None else self.source.first(self.taken)
        assert not isinstance(found, str)
        return found

    @property
    def text(self) -> str:
        found = "" if self.source is None else self.source.first(self.taken)
        assert isinstance(found, str)
        return found


def _taken(given: int | None, source: KeptConversation) -> int:
    if given is None:
        return source.length
    if not 0 <= given <= source.length:
        unit = "messages" if source.kind == "messages" else "characters"
        raise RequestError(
            f"continue_after must be from 0 to {source.length}, the number of kept {unit}, not {given}.",
            param="continue_after",
        )
    return given


def keeps_conversation(fields: GenerationFields) -> bool:
    """Whether the request asks to keep the conversation.

    Raises:
        RequestError: it does, and chose its own id.
    """
    if fields.keep and (fields.rid is not None or fields.request_id is not None):
        raise RequestError(
            "keep needs an id that nobody can guess, so the request can't choose its own: leave rid out.",
            param="keep",
        )
    return bool(fields.keep)


class ConversationRecorder:
    """Gathers one answer, and keeps the conversation when the answer is complete."""

    def __init__(
        self,
        conversations: ConversationStore,
        conversation_id: str,
        continuation: Continuation,
        new: Items,
        continues_last_message: bool = False,
    ) -> None:
        """
        Args:
            new: the request's own messages or text.
            continues_last_message: the answer is a part of the last message before it.
        """
        self._conversations = conversations
        self._id = conversation_id
        self._continuation = continuation
        self._new = new
        self._continues_last_message = continues_last_message
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._response = b""

    def add(self, text: str, reasoning: str = "", calls: Sequence[dict[str, Any]] = ()) -> None:
        """
        Args:
            calls: tool calls, or pieces of them, as the client gets them.
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

    def end(self, finish_reason: str | None, response: bytes = b"") -> bool:
        """The answer is complete. Returns whether the conversation is kept.

        Args:
            response: JSON of the response, to be retrieved.
        """
        self._response = response
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
            self._id, continuation.access_key, items, continuation.source, taken, self._response
        )

    def _message(self) -> dict[str, Any] | None:
        """The answer as a message of the chat template; None if a tool call is incomplete."""
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


def conversation_routes(state: ServerState) -> APIRouter:
    """``/v1/conversations``: keeps a prompt that many requests will begin with."""
    router = Endpoints(state)

    @router.takes("/v1/conversations", KeepRequest)
    async def keep(request: Request, fields: KeepRequest) -> Response:
        continuation = Continuation.find_one_prompt(fields, state.conversations, request)
        items: Items = fields.prompt or ""
        if fields.messages is not None:
            items = to_template_messages(fields.messages)
        name = new_id("conv")
        kept = state.conversations.keep(
            name, continuation.access_key, items, continuation.source, continuation.taken
        )
        return json_response({"id": name, "kept": kept, "length": continuation.taken + len(items)})

    return router
