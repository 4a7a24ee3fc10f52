"""Continues and records kept conversations: ``continue_from`` and ``keep``."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from radixrt.api.conversations.store import ConversationStore, Items, KeptConversation, Kind
from radixrt.api.http.keys import Caller
from radixrt.api.requests.protocol import GenerationFields, KeepRequest, PromptRequest
from radixrt.api.state import Context
from radixrt.base.errors import RequestError, wrong


class Continuing(Protocol):
    """The fields of a request that may go on from a kept conversation."""

    continue_from: str | None
    continue_after: int | None
    cache_salt: str | None


def access_key_of(caller: Caller, cache_salt: str | None) -> bytes:
    """A digest of caller and cache salt. A request may go on from conversations with the same
    one."""
    client = caller.tenant.name.encode() or caller.access
    salt = (cache_salt or "").encode("utf-8", "surrogatepass")
    return hashlib.blake2b(salt, key=hashlib.blake2b(client, digest_size=32).digest()).digest()


@dataclass(frozen=True)
class Continuation:
    """The beginning of a kept conversation that a request goes on from, or nothing."""

    conversations: ConversationStore
    access_key: bytes
    source: KeptConversation | None = None
    taken: int = 0
    """Number of its messages, or characters."""

    @staticmethod
    def find(fields: Continuing, kind: Kind, context: Context) -> "Continuation":
        """Raises RequestError if the fields don't fit each other, or there is no such conversation."""
        conversations = context.state.conversations
        access_key = access_key_of(context.caller, fields.cache_salt)
        if fields.continue_from is None:
            if fields.continue_after is not None:
                raise wrong(
                    "continue_after",
                    "is the length of a kept conversation to continue, but there is no continue_from",
                )
            return Continuation(conversations, access_key)
        opened = context.state.prompts.kept(fields.continue_from, access_key)
        source = opened or conversations.find(fields.continue_from, access_key)
        if source.kind != kind:
            path = "/v1/completions" if source.kind == "text" else "/v1/chat/completions"
            raise wrong(
                "continue_from", f"names a conversation that was kept by {path}; continue it there"
            )
        taken = _taken(fields.continue_after, source)
        return Continuation(conversations, access_key, source, taken)

    @staticmethod
    def find_one_prompt(fields: KeepRequest | PromptRequest, context: Context) -> "Continuation":
        """Raises RequestError if there is not exactly one prompt, or there is no such conversation."""
        if (fields.messages is None) == (fields.prompt is None):
            raise RequestError("Give either messages or a prompt (a string).", param="messages")
        kind: Kind = "text" if fields.messages is None else "messages"
        return Continuation.find(fields, kind, context)

    def keep(self, name: str, items: Items, taken: int, response: bytes = b"") -> bool:
        """:meth:`ConversationStore.keep` of what goes on from it."""
        return self.conversations.keep(name, self.access_key, items, self.source, taken, response)

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

    def recorder(
        self,
        fields: GenerationFields,
        response_id: str,
        new: Items,
        continues_last_message: bool = False,
    ) -> "ConversationRecorder | None":
        """Keeps the conversation under the id of the response; None: it is not to be kept.

        Args:
            new: the request's own messages or text.
            continues_last_message: the answer is a part of the last message before it.

        Raises:
            RequestError: the client has chosen the id, so that others could guess it.
        """
        if not fields.keep:
            return None
        if fields.rid is not None or fields.request_id is not None:
            raise wrong(
                "keep",
                "needs an id that nobody can guess, so the request can't choose its own: leave rid out",
            )
        return ConversationRecorder(self, response_id, new, continues_last_message)


def _taken(given: int | None, source: KeptConversation) -> int:
    if given is None:
        return source.length
    if not 0 <= given <= source.length:
        unit = "messages" if source.kind == "messages" else "characters"
        raise wrong(
            "continue_after",
            f"must be from 0 to {source.length}, the number of kept {unit}, not {given}",
        )
    return given


class ConversationRecorder:
    """Gathers one answer, and keeps the conversation when the answer is complete; see
    :meth:`Continuation.recorder`."""

    def __init__(
        self,
        continuation: Continuation,
        conversation_id: str,
        new: Items,
        continues_last_message: bool = False,
    ) -> None:
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
        if finish_reason in (None, "abort"):
            return False
        before, taken = self._new, self._continuation.taken
        if isinstance(before, str):
            items: Items = before + "".join(self._content)
        else:
            message = self._message()
            if message is None:
                return False
            if self._continues_last_message:
                if before:
                    *before, last = before
                else:
                    last, taken = self._continuation.messages[-1], taken - 1
                message = {**last, **message, "content": last["content"] + message["content"]}
            items = [*before, message]
        return self._continuation.keep(self._id, items, taken, response)

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
