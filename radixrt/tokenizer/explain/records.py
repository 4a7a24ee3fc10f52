"""Remembers the last prompts: their tokens, and where their messages are in them.

A message is remembered as a fingerprint, which tells whether two requests sent the same one.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from radixrt.messages.ids import PackedIds, num_ids, unpack_ids
from radixrt.messages.images import ImageRun
from radixrt.messages.requests import ChatPrompt
from radixrt.tokenizer.prompt.kept_turns import AnswerParts, called_functions
from radixrt.tokenizer.prompt.segments import Segment

MAX_BYTES = 1 << 24
"""Memory of all remembered prompts of a server."""

_RECORD_BYTES = 1100
"""Memory of a prompt without tokens, and of its places in the tables (measured: 660 to 1,100)."""
_MESSAGE_BYTES = 480
"""Memory of a message and its segments (measured: 470)."""
_ANSWER_BYTES = 100
"""Memory of a sequence's id and of an answer's fingerprint."""

MAX_DECODED = 8192
"""Tokens of a segment that are decoded to find a place in it; some milliseconds."""

_ENCODER = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, eq=False, slots=True)
class ChatLayout:
    """The messages of a chat's prompt, and their places in its text."""

    segments: list[int]
    """The place where each segment of the text begins, in characters; and the length of the
    text."""
    tokens: list[int]
    """Number of tokens before each segment; and of all."""
    spans: list[tuple[int, int]]
    """Beginning and end of each message's content in the text; empty where the template has changed
    it."""
    roles: list[str]
    messages: list[int]
    """A fingerprint of each message."""
    tools: list[tuple[str, int]]
    """Name and fingerprint of each tool."""

    @staticmethod
    def from_prompt(
        prompt: ChatPrompt, segments: list[Segment], spans: list[tuple[int, int]]
    ) -> "ChatLayout":
        last = segments[-1]
        return ChatLayout(
            [*(segment.start for segment in segments), last.start + len(last.text)],
            list(accumulate((len(segment.ids) for segment in segments), initial=0)),
            spans,
            [message.get("role", "") for message in prompt.messages],
            [fingerprint(message) for message in prompt.messages],
            [(_name(tool), hash(msgspec.json.encode(tool))) for tool in prompt.tools or ()],
        )

    def position(self, token_index: int, length_of: Callable[[int, int], int]) -> int:
        """The place in the text where a token begins, in characters; estimated far inside of a long
        segment.

        Args:
            length_of: number of characters of the tokens from one index to another.
        """
        number = bisect_right(self.tokens, token_index) - 1
        start, begin = self.segments[number], self.tokens[number]
        if token_index - begin <= MAX_DECODED:
            return start + length_of(begin, token_index)
        chars, tokens = self.segments[number + 1] - start, self.tokens[number + 1] - begin
        return start + chars * (token_index - begin) // tokens

    def message_at(self, position: int) -> int:
        """The message in whose content a place of the text is, or the next one."""
        for index, (_, end) in enumerate(self.spans):
            if position < end:
                return index
        return len(self.spans) - 1

    def num_alike(self, earlier: "PromptRecord") -> int:
        """Number of leading messages that an earlier request has sent too, or has got as its
        answer."""
        assert earlier.layout is not None
        before = earlier.layout.messages
        alike = 0
        for mine, theirs in zip(self.messages, before, strict=False):
            if mine != theirs:
                return alike
            alike += 1
        if alike == len(before) < len(self.messages):
            alike += self.messages[alike] in earlier.answers
        return alike


@dataclass(eq=False, slots=True)
class PromptRecord:
    """The prompt of one request."""

    request_id: str
    tenant: str
    token_ids: PackedIds
    """The ids by which prefixes are compared."""
    layout: ChatLayout | None
    """None: it is not a chat, or its text has special tokens in the messages."""
    seq_ids: list[int] = field(default_factory=list)
    """The sequences of its answers."""
    answers: set[int] = field(default_factory=set)
    """Fingerprints of its answers."""
    session: str = ""
    images: Sequence[ImageRun] = ()

    def image_at(self, index: int) -> int | None:
        """The number, from 1, of the image to which a place of the prompt belongs; None: it is
        text."""
        number = 0
        for run in self.images:
            number += not run.first
            if run.start <= index < run.start + run.num_tokens:
                return number
        return None

    @property
    def num_tokens(self) -> int:
        return num_ids(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Memory, estimated."""
        messages = len(self.layout.spans) if self.layout else 0
        parts = _MESSAGE_BYTES * messages + _ANSWER_BYTES * len(self.seq_ids)
        return _RECORD_BYTES + len(self.token_ids) + parts

    def ids(self, start: int, end: int) -> list[int]:
        """Token ids of a part of the prompt."""
        ids: list[int] = unpack_ids(self.token_ids)[max(0, start) : end].tolist()
        return ids

    def add_answer(self, parts: AnswerParts) -> None:
        """Note an answer as its client gets it."""
        try:
            self.answers.add(_answer_fingerprint("".join(parts.content), parts.decoded_calls()))
        except msgspec.DecodeError:
            return  # a call was cut off: no client can send it back


class PromptRecords:
    """The last prompts, by request and by sequence. The oldest are dropped beyond a number of
    bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._most_bytes = max_bytes
        self._records: OrderedDict[tuple[str, str], PromptRecord] = OrderedDict()
        """Records by tenant and request id."""
        self._by_seq_id: dict[int, PromptRecord] = {}
        self._num_bytes = 0

    def add(self, record: PromptRecord) -> None:
        """Remember a record, in place of an earlier one of its request id."""
        key = record.tenant, record.request_id
        if (earlier := self._records.pop(key, None)) is not None:
            self._forget(earlier)
        self._records[key] = record
        self._by_seq_id.update(dict.fromkeys(record.seq_ids, record))
        self._num_bytes += record.num_bytes
        while self._num_bytes > self._most_bytes:
            self._forget(self._records.popitem(last=False)[1])

    def _forget(self, record: PromptRecord) -> None:
        self._num_bytes -= record.num_bytes
        for seq_id in record.seq_ids:
            del self._by_seq_id[seq_id]

    def find(self, tenant: str, request_id: str) -> PromptRecord | None:
        """A tenant's request; of several prompts, the first."""
        found = self._records.get((tenant, request_id))
        return found or self._records.get((tenant, f"{request_id}-0"))

    def of_session(self, tenant: str, session: str) -> list[PromptRecord]:
        """A tenant's requests of a session that have sequences, the oldest first."""
        return [
            record
            for record in self._records.values()
            if record.tenant == tenant and record.session == session and record.seq_ids
        ]

    def of_sequence(self, seq_id: int) -> PromptRecord | None:
        return self._by_seq_id.get(seq_id)


def fingerprint(message: dict[str, Any]) -> int:
    """Equal for messages that are sent as the same ones. The reasoning of an answer does not count,
    nor do the ids of calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = msgspec.json.encode(content).decode()
    if message.get("role") == "assistant":
        return _answer_fingerprint(content, called_functions(message.get("tool_calls") or ()))
    return hash((message.get("role"), content, message.get("name")))


def _answer_fingerprint(content: str, calls: Sequence[tuple[str, Any]]) -> int:
    return hash(("assistant", content.strip(), _ENCODER.encode(calls) if calls else b""))


def _name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, dict) else ""
