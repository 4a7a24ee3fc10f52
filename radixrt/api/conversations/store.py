"""Keeps conversations, so that clients need not send them again.

A conversation that goes on from another holds only its new part and a reference to its parent: a
chat of a hundred messages, or a hundred continuations of one document, are stored once. Use of a
conversation counts as use of its parents, so the least recently used one, which is dropped first,
is never the parent of one that stays.
"""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from radixrt.api.http.json_size import upper_bound
from radixrt.api.requests.protocol import MAX_ENTRIES
from radixrt.base.errors import RequestError

Kind = Literal["messages", "text"]
Items = list[dict[str, Any]] | str
"""Messages as chat templates take them, or a text; counted in messages, or in characters."""

CONVERSATION_GONE = "conversation_gone"
"""The code of errors about an unknown conversation."""
MAX_LENGTH = {"messages": MAX_ENTRIES["messages"], "text": 32 << 20}
"""Messages or characters of a conversation with all of its parents."""
MAX_LINKS = 10_000
"""Conversations in a row, each the parent of the next. All of them are visited at each use. A text
may grow by one character at each continuation, so its length hardly bounds them."""
MAX_MARKS = 200_000
"""Brackets and commas of its messages with all of its parents, those in texts too: they are parsed
at each continuation."""

OVERHEAD_BYTES = 512
"""Estimated memory of one conversation beside its text."""


@dataclass(eq=False)
class KeptConversation:
    """A conversation up to the end of one answer. Immutable but for its time of use and its key."""

    id: str
    access_key: bytes
    """Only requests with the same key may go on from it."""
    kind: Kind
    parent: "KeptConversation | None"
    taken: int
    """Messages or characters of the parent that come first."""
    own: bytes
    """The messages or characters that follow: JSON, or the text in UTF-8."""
    length: int
    """Messages or characters in all."""
    used_at: float
    response: bytes = b""
    """JSON of the response that ended it, if it can be retrieved."""
    marks: int = 0
    """Brackets and commas in all."""
    links: int = 1
    """This one and its parents."""

    @property
    def num_bytes(self) -> int:
        return len(self.own) + len(self.response) + OVERHEAD_BYTES

    def first(self, count: int) -> Items:
        """Its first messages or characters."""
        pieces: list[Items] = []
        node: KeptConversation | None = self
        while node is not None:
            if count > node.taken:
                pieces.append(_decoded(node.kind, node.own)[: count - node.taken])
                count = node.taken
            node = node.parent
        pieces.reverse()
        if self.kind == "text":
            return "".join(piece for piece in pieces if isinstance(piece, str))
        return [message for piece in pieces for message in piece if isinstance(message, dict)]


def conversation_gone() -> RequestError:
    return RequestError(
        "This conversation is not kept, or not any more: send all of it again, with keep to have it kept anew.",
        status=404,
        param="continue_from",
        code=CONVERSATION_GONE,
    )


class ConversationStore:
    """The kept conversations of one server."""

    def __init__(
        self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            max_bytes: of all conversations together; beyond it the least recently used ones are
                dropped.
            ttl_s: seconds without use after which a conversation is dropped.
        """
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: OrderedDict[str, KeptConversation] = OrderedDict()
        """The least recently used first; each before its parent."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, conversation_id: str, access_key: bytes) -> KeptConversation:
        """Raises RequestError if it is not kept, or was made with another key; the client does not
        learn which."""
        self._forget_expired()
        conversation = self._kept.get(conversation_id)
        if conversation is None or conversation.access_key != access_key:
            raise conversation_gone()
        self._use(conversation)
        return conversation

    def keep(
        self,
        conversation_id: str,
        access_key: bytes,
        items: Items,
        parent: KeptConversation | None = None,
        taken: int = 0,
        response: bytes = b"",
    ) -> bool:
        """Keep a conversation: the first ``taken`` messages or characters of ``parent``, then
        ``items``.

        Args:
            response: JSON of the response that ends it, to be retrieved.

        Returns:
            False if it is larger than a conversation may be, or than the whole store, and therefore
            not kept.
        """
        if parent is not None and self._kept.get(parent.id) is not parent:
            items, parent, taken = (
                _joined(parent.first(taken), items),
                None,
                0,
            )  # it was forgotten meanwhile
        while parent is not None and taken <= parent.taken:
            parent = parent.parent
        own = _encoded(items)
        marks = 0 if isinstance(items, str) else upper_bound(own).values
        conversation = KeptConversation(
            id=conversation_id,
            access_key=access_key,
            kind="text" if isinstance(items, str) else "messages",
            parent=parent,
            taken=taken,
            own=own,
            length=taken + len(items),
            used_at=self._clock(),
            response=response,
            marks=marks + (0 if parent is None else parent.marks),
            links=1 + (0 if parent is None else parent.links),
        )
        is_long = (
            conversation.length > MAX_LENGTH[conversation.kind] or conversation.links > MAX_LINKS
        )
        if is_long or conversation.marks > MAX_MARKS or conversation.num_bytes > self._max_bytes:
            return False
        self._kept[conversation_id] = conversation
        self.num_bytes += conversation.num_bytes
        self._use(conversation)
        self._forget_expired()
        while self.num_bytes > self._max_bytes:
            self._forget_first()
        return conversation_id in self._kept

    def hide(self, conversation_id: str, access_key: bytes) -> None:
        """Let no request find a conversation any more. It is dropped when none that goes on from it
        is in use.

        Raises:
            RequestError: as in :meth:`find`.
        """
        self.find(conversation_id, access_key).access_key = secrets.token_bytes()

    def _use(self, conversation: KeptConversation) -> None:
        node: KeptConversation | None = conversation
        now = self._clock()
        while node is not None:
            node.used_at = now
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
    """The items as bytes, since these take the memory that they seem to."""
    return items.encode() if isinstance(items, str) else msgspec.json.encode(items)


def _decoded(kind: Kind, own: bytes) -> Items:
    return own.decode() if kind == "text" else msgspec.json.decode(own, type=list[dict[str, Any]])


def _joined(before: Items, after: Items) -> Items:
    return before + after  # type: ignore[operator]
