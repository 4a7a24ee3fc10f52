"""Base of the messages that a receiver distinguishes by their tag."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""
