"""Base of the messages that a receiver distinguishes by their tag, and the tool calls of
answers."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""


class ToolCall(msgspec.Struct, frozen=True, array_like=True):
    """One tool call, or a piece of one; only the first piece has a name."""

    index: int
    """Index of the call in its answer."""
    name: str
    arguments: str
    """JSON, or the next piece of it."""
