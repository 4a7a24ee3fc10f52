"""Escapes plain text for a regular expression, and gives its classes one meaning on all backends."""

import re
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


_CLASSES = {
    "d": "[0-9]",
    "w": "[A-Za-z0-9_]",
    "s": r"[\t\n\x0b\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
}


def with_ecma_classes(pattern: str) -> str:
    """The pattern with ``\\d``, ``\\w`` and ``\\s`` as in ECMA-262, and so as in the patterns of JSON schemas; in the engines that
    read the pattern they hold the digits, letters and blanks of all scripts. A class stands inside a class, too.

    >>> with_ecma_classes(r"\\d[a\\D]\\\\d")
    '[0-9][a[^0-9]]\\\\\\\\d'
    """
    return re.sub(r"\\(.)", _class_of, pattern, flags=re.DOTALL)


def _class_of(escape: re.Match[str]) -> str:
    members = _CLASSES.get(escape[1].lower())
    if members is None:
        return escape[0]
    return members if escape[1].islower() else "[^" + members[1:]
