"""The reply to a call, and the structs that its value may be."""

from typing import Any

import msgspec

from radixrt.messages.answers import RequestFailed
from radixrt.messages.message import Message


class CallReply(Message, frozen=True, kw_only=True):
    """Answers a call: a value or an error."""

    call_id: int
    value: Any = None
    """The value as the call documents it; a struct is received as builtins."""
    error: RequestFailed | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: list[int]
    prompt: str
    """The prompt as text."""


class CacheMatch(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a prompt that the cache holds."""

    prompt_tokens: int
    cached_tokens: int
    """Leading tokens of the prompt, in whole pages."""


class LeaseGranted(msgspec.Struct, frozen=True, kw_only=True):
    """A lease: a prompt's KV stays until it expires or is released."""

    lease: str
    """Its id, for release."""
    pinned_tokens: int
    """Leading tokens of the prompt that it covers."""
    expires_in_s: float
