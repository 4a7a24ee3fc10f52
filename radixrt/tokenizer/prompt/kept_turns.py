"""Keeps the text of each turn of a chat as the model wrote it, for the chat's later requests.

A template may drop the reasoning of earlier answers, or write a tool call in its own way. The
prompt then does not begin with the earlier prompt and answer, and their KV cannot be used. A kept
turn replaces what the template makes of the same messages.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.message import ToolCall
from radixrt.messages.requests import ChatPrompt
from radixrt.tokenizer.prompt.kept_answers import TokenMemory, text_digest

CAPACITY_BYTES = 64 << 20

Messages = list[dict[str, Any]]


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """What a chat's prompt adds to the turn before, and the answer to it."""

    key: bytes
    before: "KeptTurn | None"
    text: str
    """The text from the end of the turn before, to the end of the answer."""
    end: int
    """Number of characters of the chat up to the end of the answer."""
    reasoning: str
    """The reasoning of the answer."""

    def chain(self) -> "list[KeptTurn]":
        """All turns up to this one, in order."""
        turns, turn = [], self
        while True:
            turns.append(turn)
            if turn.before is None:
                return turns[::-1]
            turn = turn.before


class KeptTurns:
    """Turns by all messages up to the answer. The reasoning does not count, since few clients send
    it back.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self.memory: TokenMemory[KeptTurn] = TokenMemory(CAPACITY_BYTES)

    def keep(self, turn: KeptTurn) -> None:
        size = sys.getsizeof(turn.text) + sys.getsizeof(turn.reasoning)
        self.memory.keep(turn.key, turn, size)

    def last(self, history: "History", num_messages: int) -> tuple[int, KeptTurn] | None:
        """The last answer of the model among the first messages, with its index.

        Answers with other reasoning than the request has are another's.
        """
        if not len(self.memory):
            return None
        for index, key, reasoning in reversed(history.answers):
            turn = self.memory.find(key) if index < num_messages else None
            if turn is not None and reasoning in ("", turn.reasoning):
                for earlier in turn.chain()[::-1]:  # so that no turn outlives those before it
                    self.memory.find(earlier.key)
                return index, turn
        return None


class History:
    """Digests of the beginnings of a chat's messages.

    Attributes:
        answers: of each message of the assistant: its index, the digest up to it, its reasoning.
    """

    def __init__(self, prompt: ChatPrompt, root: CacheRoot) -> None:
        encoder = msgspec.json.Encoder(order="deterministic")
        self._digest = text_digest(root)
        self._digest.update(encoder.encode([prompt.tools, prompt.template_kwargs]))
        self.answers: list[tuple[int, bytes, str]] = []
        for index, message in enumerate(prompt.messages):
            if message.get("role") != "assistant":
                self._digest.update(encoder.encode(message))
                continue
            self._digest = _with_answer(
                self._digest,
                message.get("content") or "",
                called_functions(message.get("tool_calls") or ()),
            )
            reasoning = (message.get("reasoning_content") or "").strip()
            self.answers.append((index, self._digest.digest(), reasoning))

    def key(self, content: str, calls: list[tuple[str, Any]]) -> bytes:
        """The digest of these messages and an answer to them."""
        return _with_answer(self._digest, content, calls).digest()


@dataclass
class OpenTurn:
    """A prompt whose answers are to be kept."""

    turns: KeptTurns
    history: History
    text: str
    """The text of the whole prompt."""
    before: KeptTurn | None
    """The turn with which the text begins."""

    def keep(self, written: str, answer: "AnswerParts") -> None:
        """Keep an answer.

        Args:
            written: its text as generated.
        """
        try:
            calls = answer.decoded_calls()
        except msgspec.DecodeError:  # cut off: no client can send it back
            return
        start = 0 if self.before is None else self.before.end
        text = self.text[start:] + written
        key = self.history.key("".join(answer.content), calls)
        reasoning = "".join(answer.reasoning).strip()
        self.turns.keep(KeptTurn(key, self.before, text, start + len(text), reasoning))


@dataclass
class AnswerParts:
    """Parts of an answer, as its client gets them."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    """Name and arguments of each."""

    def add(self, content: str, reasoning: str, calls: Sequence[ToolCall]) -> None:
        self.content.append(content)
        self.reasoning.append(reasoning)
        for call in calls:
            if call.name:
                self.calls.append([call.name, call.arguments])
            elif self.calls:
                self.calls[-1][1] += call.arguments

    def as_message(self) -> dict[str, Any] | None:
        """The answer as a message of the chat template, without its reasoning; None if a call is
        incomplete."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        try:
            calls = self.decoded_calls()
        except msgspec.DecodeError:
            return None
        if calls:
            functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
            message["tool_calls"] = [{"type": "function", "function": one} for one in functions]
        return message

    def decoded_calls(self) -> list[tuple[str, Any]]:
        """Name and arguments, as JSON values, of each call.

        Raises:
            msgspec.DecodeError: a call was cut off.
        """
        return [(name, msgspec.json.decode(arguments or "{}")) for name, arguments in self.calls]


def _with_answer(
    before: "hashlib.blake2b", content: str, calls: list[tuple[str, Any]]
) -> "hashlib.blake2b":
    digest = before.copy()
    answer = [content.strip().encode("utf-8", "replace").decode(), calls]
    digest.update(msgspec.json.encode(answer, order="deterministic"))
    return digest


def called_functions(tool_calls: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Name and arguments of each call, without its id, which a client may change."""
    functions = [call.get("function") or {} for call in tool_calls]
    return [(f.get("name", ""), f.get("arguments")) for f in functions]
