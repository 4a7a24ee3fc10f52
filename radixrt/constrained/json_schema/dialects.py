"""Writes a ``pattern`` so that another regex engine reads it as ECMA-262 does.

Engines differ about ``\\d``, ``\\w``, ``\\s``, the dot and the end. These are written as explicit
classes.
"""

import functools
import re
from dataclasses import dataclass

from radixrt.constrained.json_schema.ecma_regex import (
    SYNTAX_CHARACTERS,
    Assertion,
    Backreference,
    CharacterSet,
    Close,
    Dot,
    Open,
    Or,
    Repeat,
    Token,
    UnknownSyntax,
    parse,
)

_SPACES = r"\t\n\x0b\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACES_OF_ANY = r"\t-\r\x1c- \x85\xa0\u1680\u180e\u2000-\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"
_WORD_OF_ANY = r"\p{L}\p{N}\p{M}\p{Pc}"

_NUL = r"\x00"
"""A character that no grammar writes. The portable form leaves it out of classes: llguidance 1.9.1
takes a class of all control characters (but \\n) for one of all escapes of JSON, so that ``[^"]``
and ``[\\x00-!]`` would match a quote, or a backslash."""

_Items = tuple[str | tuple[int, int], ...]


@dataclass(frozen=True)
class _Dialect:
    """How the meaning of the letters ``d``, ``w`` and ``s`` is written for an engine."""

    inside: dict[str, str]
    """The members of each, written for a character class."""
    outside: dict[str, str]
    """A capital letter or a negated class means every character that is not a member."""
    everything: str
    """A class of all characters."""
    is_python: bool
    """It has references to groups, assertions before a class, and an end of its own."""


_PORTABLE = _Dialect(
    inside={"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES},
    outside={"d": r"\p{Nd}", "w": _WORD_OF_ANY, "s": _SPACES_OF_ANY},
    everything="[\\x00-\U0010ffff]",
    is_python=False,
)
"""For each letter the members, and the non-members, on which all engines agree: a string that
matches the portable form matches the pattern under each reading."""
_ECMA_262 = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES + r"\ufeff"}
_PYTHON = _Dialect(inside=_ECMA_262, outside=_ECMA_262, everything=r"[\s\S]", is_python=True)


@functools.lru_cache(maxsize=4096)
def portable(pattern: str) -> str:
    """The pattern in the form for grammars. Every text that it matches, the pattern matches. Raises
    UnknownSyntax if the pattern is not ECMA-262, engines differ about it, or no grammar has a
    construct that it uses."""
    return "".join(_written(token, _PORTABLE) for token in parse(pattern))


def is_whole(pattern: str) -> bool:
    """Whether the portable form matches every text that the pattern matches. It leaves out
    characters about which engines differ: ``\\W`` matches é in ECMA-262, and not in engines that
    know more letters. Raises UnknownSyntax as ``portable``."""
    return not any(
        isinstance(token, CharacterSet) and _leaves_out(token) for token in parse(pattern)
    )


def _leaves_out(token: CharacterSet) -> bool:
    letters = _letters(token)
    if _is_all(letters):
        return False
    return not letters.isdisjoint("DWSs") or (token.negated and not letters.isdisjoint("dw"))


@functools.lru_cache(maxsize=4096)
def python_pattern(pattern: str) -> str:
    """The pattern for Python's ``re``, with which a validator reads it exactly as ECMA-262 does.
    Raises UnknownSyntax if Python can't express it."""
    written = "".join(_written(token, _PYTHON) for token in parse(pattern))
    try:
        re.compile(f"(?a:{written})")
    except (re.error, OverflowError, RecursionError) as error:
        raise UnknownSyntax(f"Python's re says: {error}") from error
    return f"(?a:{written})"


def _written(token: Token, dialect: _Dialect) -> str:
    match token:
        case CharacterSet():
            return _set(token, dialect)
        case Dot():
            return r"[^\n\r\u2028\u2029]"
        case Assertion(text):
            return "\\Z" if text == "$" and dialect.is_python else text
        case Backreference(name):
            if not dialect.is_python or not name.isdecimal():
                raise UnknownSyntax("a reference to a group")
            return f"(?:\\{name})"
        case Open(kind):
            return f"({kind}" if dialect.is_python else f"({kind or '?:'}"
        case Close():
            return ")"
        case Or():
            return "|"
        case Repeat(least, most, lazy):
            short = {(0, None): "*", (1, None): "+", (0, 1): "?", (least, least): f"{{{least}}}"}
            bounds = f"{{{least},{'' if most is None else most}}}"
            return short.get((least, most), bounds) + ("?" if lazy else "")


def _set(token: CharacterSet, dialect: _Dialect) -> str:
    if not token.is_class and isinstance(token.items[0], tuple):
        return _character(token.items[0][0])
    letters = _letters(token)
    if _is_all(letters) or not token.items:
        is_everything = bool(token.items) != token.negated
        return dialect.everything if is_everything else _nothing(dialect)
    known = dialect.outside if token.negated else dialect.inside
    keeps_all = dialect.is_python or token.negated
    items = token.items if keeps_all else _without_nul(token.items)
    members = "".join(_member(item, known) for item in items)
    others = [f"[^{dialect.outside[letter.lower()]}]" for letter in "DWS" if letter in letters]
    if not others:
        end = _NUL if token.negated and not dialect.is_python else ""
        return f"[{'^' if token.negated else ''}{members}{end}]"
    parts = [f"[{members}]", *others] if members else others
    union = parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
    if not token.negated:
        return union
    if not dialect.is_python:
        raise UnknownSyntax("a negated class that holds \\D, \\W or \\S")
    return f"(?:(?!{union}){dialect.everything})"


def _without_nul(items: _Items) -> _Items:
    """The same, if it is the only one."""
    others = (item for item in items if item != (0, 0))
    return tuple(i if isinstance(i, str) else (max(i[0], 1), i[1]) for i in others) or items


def _letters(token: CharacterSet) -> set[str]:
    """The escapes for sets that it holds."""
    return {item for item in token.items if isinstance(item, str)}


def _is_all(letters: set[str]) -> bool:
    """One of them, and its opposite, are there."""
    return any(letter.swapcase() in letters for letter in letters)


def _nothing(dialect: _Dialect) -> str:
    if not dialect.is_python:
        raise UnknownSyntax("a class of no characters")
    return "(?!)"


def _member(item: str | tuple[int, int], known: dict[str, str]) -> str:
    if isinstance(item, tuple):
        low, high = map(_character, item)
        return low if low == high else f"{low}-{high}"
    if item[0] in "pP":
        return "\\" + item
    return known.get(item, "")


def _character(code: int) -> str:
    character = chr(code)
    if character in SYNTAX_CHARACTERS or character in "-&~":
        return "\\" + character
    return character if " " <= character <= "~" or code >= 0xA0 else f"\\x{code:02x}"
