"""What is remembered of conversations, so that clients need not send them again?

A conversation that goes on from another holds only what is new, and a reference to it: a chat of a hundred turns, or a
hundred continuations of one document, cost what was said once. Whoever is used keeps what it stands on young, so what
goes first, when room is needed, is never in use by anything that stays.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from radixrt.base.errors import RequestError

Kind = Literal["messages", "text"]
Items = list[dict[str, Any]] | str
"""Messages as chat templates take them, or a text; counted in messages, or in characters."""

OVERHEAD_BYTES = 512
"""About what the bookkeeping of one conversation takes."""


@dataclass(eq=False)
class Conversation:
    """What was said up to the end of one answer. Never changes."""

    id: str
    owner: bytes
    kind: Kind
    parent: "Conversation | None"
    taken: int
    """So many of the parent's messages or characters come first."""
    own: bytes
    """What comes then: JSON, or the text in UTF-8."""
    length: int
    """Messages or characters in all."""
    used_at: float

    @property
    def num_bytes(self) -> int:
        return len(self.own) + OVERHEAD_BYTES

    def first(self, count: int) -> Items:
        """Its first messages or characters."""
        pieces: list[Items] = []
        node: Conversation | None = self
        while node is not None:
            if count > node.taken:
                pieces.append(_decoded(node.kind, node.own)[: count - node.taken])
                count = node.taken
            node = node.parent
        pieces.reverse()
        if self.kind == "text":
            return "".join(piece for piece in pieces if isinstance(piece, str))
        return [message for piece in pieces for message in piece if isinstance(message, dict)]


class Conversations:
    """The remembered conversations of one server."""

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            max_bytes: of all conversations together; beyond it the least recently used ones are forgotten.
            ttl_s: one that is not used for so long is forgotten.
        """
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: OrderedDict[str, Conversation] = OrderedDict()
        """The least recently used first; each before its parent."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, conversation_id: str, owner: bytes) -> Conversation:
        """Raises:
        RequestError: there is none of that id, or none any more, or it is another's; nobody learns which.
        """
        self._forget_expired()
        conversation = self._kept.get(conversation_id)
        if conversation is None or conversation.owner != owner:
            raise RequestError(
                "This conversation is not remembered, or not any more: send all of it again, with keep to have it "
                "remembered anew.",
                status=404,
                param="continue_from",
                code="conversation_gone",
            )
        self._use(conversation)
        return conversation

    def keep(
        self,
        conversation_id: str,
        owner: bytes,
        items: Items,
        parent: Conversation | None = None,
        taken: int = 0,
    ) -> bool:
        """Remember a conversation: so many of another's messages or characters, then these.

        Returns:
            Whether it is remembered; one that is larger than all the room there is, is not.
        """
        if parent is not None and self._kept.get(parent.id) is not parent:
            items, parent, taken = (
                _joined(parent.first(taken), items),
                None,
                0,
            )  # it was forgotten meanwhile
        while parent is not None and taken <= parent.taken:
            parent = parent.parent
        conversation = Conversation(
            id=conversation_id,
            owner=owner,
            kind="text" if isinstance(items, str) else "messages",
            parent=parent,
            taken=taken,
            own=_encoded(items),
            length=taken + len(items),
            used_at=self._clock(),
        )
        if conversation.num_bytes > self._max_bytes:
            return False
        self._kept[conversation_id] = conversation
        self.num_bytes += conversation.num_bytes
        self._use(conversation)
        self._forget_expired()
        while self.num_bytes > self._max_bytes:
            self._forget_first()
        return conversation_id in self._kept

    def _use(self, conversation: Conversation) -> None:
        node: Conversation | None = conversation
        while node is not None:
            node.used_at = self._clock()
            self._kept.move_to_end(node.id)
            node = node.parent

    def _forget_expired(self) -> None:
        oldest_allowed = self._clock() - self._ttl_s
        while self._kept and next(iter(self._kept.values())).used_at < oldest_allowed:
            self._forget_first()

    def _forget_first(self) -> None:
        _, conversation = self._kept.popitem(last=False)
        self.num_bytes -= conversation.num_bytes


def _encoded(items: Items) -> bytes:
    """As bytes, since these take the memory that they seem to."""
    return items.encode() if isinstance(items, str) else msgspec.json.encode(items)


def _decoded(kind: Kind, own: bytes) -> Items:
    return own.decode() if kind == "text" else msgspec.json.decode(own, type=list[dict[str, Any]])


def _joined(before: Items, after: Items) -> Items:
    return before + after  # type: ignore[operator]
