"""What do calls bring back? One CallReply each."""

from typing import Any

import msgspec

from radixrt.constrained.grammar import Unenforced
from radixrt.messages.answers import RequestFailed
from radixrt.messages.message import Message


class CallReply(Message, frozen=True, kw_only=True):
    """The end of a call."""

    call_id: int
    value: Any = None
    """The struct that the call names; where it is received, as builtins."""
    error: RequestFailed | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    prompt: str
    """As text."""


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class CacheFlushed(msgspec.Struct, frozen=True, kw_only=True):
    pages_freed: int


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True):
    """A promise that a prompt's KV stays, for a time."""

    lease: str
    """Its name, for release."""
    pinned_tokens: int
    """Leading tokens of the prompt that it is about."""
    expires_in_s: float


class CacheReleased(msgspec.Struct, frozen=True, kw_only=True):
    released_tokens: int
    """What the lease or the session was about."""


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a validator looks at, since no grammar can hold an answer to it."""

    pointer: str
    """Of the subschema that the user sent."""
    keywords: tuple[str, ...]


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What has become of a constraint."""

    backend: str
    """What enforces it."""
    checks: list[CheckReport]
    """Beside the grammar."""
    unenforced: tuple[Unenforced, ...]
    seconds: float
    """That it took."""
