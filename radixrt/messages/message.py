"""What is a message? The base of all that are told apart by a tag."""

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the tag."""
