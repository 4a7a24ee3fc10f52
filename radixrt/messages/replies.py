"""The reply to a call, and the structs that its value may be."""

from typing import Any

import msgspec

from radixrt.constrained.grammar import Unenforced
from radixrt.messages.answers import RequestFailed
from radixrt.messages.message import Message


class CallReply(Message, frozen=True, kw_only=True):
    """Answers a call: a value or an error."""

    call_id: int
    value: Any = None
    """As the call documents it; a struct is received as builtins."""
    error: RequestFailed | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    prompt: str
    """As text."""


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: a prompt's KV stays until it expires or is released."""

    lease: str
    """Its id, for release."""
    pinned_tokens: int
    """Leading tokens of the prompt that it covers."""
    expires_in_s: float


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a constraint that a validator checks, since no grammar expresses it."""

    pointer: str
    """Of the subschema that the user sent."""
    keywords: tuple[str, ...]


class CompileReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of compiling a constraint."""

    backend: str
    """The grammar backend that enforces it."""
    checks: list[CheckReport]
    """Beside the grammar."""
    unenforced: tuple[Unenforced, ...]
    seconds: float
    """Duration of the compilation."""
