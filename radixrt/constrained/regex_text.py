"""Escapes plain text for a regular expression."""

from collections.abc import Iterable

_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~/")


def escaped(text: str) -> str:
    """The expression that matches ``text`` alone, in the syntax that all backends share."""
    return "".join(
        f"\\x{{{ord(c):x}}}" if c in _SPECIAL or ord(c) < 32 or ord(c) == 127 else c for c in text
    )


def alternatives(options: Iterable[str]) -> str:
    """The expression that matches each of the options and nothing else."""
    return "(?:" + "|".join(escaped(option) for option in options) + ")"
