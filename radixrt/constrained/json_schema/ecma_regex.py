"""Parses ``pattern``, an ECMA-262 regular expression, into a list of tokens.

Escapes that engines read differently (``\\Z``, ``\\h``) and syntax that ECMA-262 does not have
raise :class:`UnknownSyntax`: such a pattern is never handed to a grammar.
"""

import re
from dataclasses import dataclass

SYNTAX_CHARACTERS = frozenset("^$\\.*+?()[]{}|/")
MAX_DEPTH = 100
"""Groups within groups."""
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}

_ESCAPE = (
    r"\\(?:(?P<set>[dDwWsS]|[pP]\{[^}]*\})"
    r"|u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|u\{(?P<long>[0-9a-fA-F]+)\}|u(?P<short>[0-9a-fA-F]{4})|x(?P<byte>[0-9a-fA-F]{2})"
    r"|c(?P<letter>[A-Za-z])|(?P<control>[tnrfv]|0(?![0-9]))|(?P<itself>[^0-9A-Za-z]))"
)
_TOKEN = re.compile(
    rf"(?P<open>\((?:\?[:=!]|\?<[=!]|\?<(?P<name>[^>]*)>|(?!\?)))|(?P<close>\))|(?P<or>\|)|(?P<dot>\.)"
    r"|(?P<assertion>[\^$]|\\[bB])|\\(?P<backreference>[1-9][0-9]*|k<[^>]*>)"
    r"|(?P<repeat>[*+?]|\{(?P<least>[0-9]+)(?P<comma>,(?P<most>[0-9]*))?\})(?P<lazy>\??)"
    r"|\[(?P<negated>\^?)(?P<class>(?:\\.|[^\]\\])*)\]"
    rf"|{_ESCAPE}|(?P<literal>[^\\()\[\]{{*+?.^$|])",
    re.DOTALL,
)
_MEMBER = re.compile(rf"\\(?P<backspace>b)|{_ESCAPE}|(?P<literal>[^\\])", re.DOTALL)


class UnknownSyntax(ValueError):
    """The text is not a pattern that all engines read alike."""


@dataclass(frozen=True)
class CharacterSet:
    """One character of a set; a lone character is a set of its own."""

    items: tuple[str | tuple[int, int], ...]
    """Escapes (``d D w W s S``, or a Unicode property such as ``p{L}``), and ranges of code points
    with both ends included."""
    negated: bool = False
    is_class: bool = False
    """It is written between brackets."""


@dataclass(frozen=True)
class Dot:
    """Any character but a line end."""


@dataclass(frozen=True)
class Assertion:
    """``^``, ``$``, ``\\b`` or ``\\B``."""

    text: str


@dataclass(frozen=True)
class Backreference:
    name: str


@dataclass(frozen=True)
class Open:
    """A group begins; ``kind`` is the text after the parenthesis: empty, ``?:``, ``?=``, ``?!``,
    ``?<=``, ``?<!``."""

    kind: str


@dataclass(frozen=True)
class Close:
    """The group that ``kind`` began ends."""

    kind: str


@dataclass(frozen=True)
class Or:
    """Another alternative."""


@dataclass(frozen=True)
class Repeat:
    """A repetition of the character or group before it."""

    least: int
    most: int | None
    lazy: bool


Token = CharacterSet | Dot | Assertion | Backreference | Open | Close | Or | Repeat


def parse(pattern: str) -> list[Token]:
    """Read a pattern. Raises UnknownSyntax if it is not ECMA-262, or engines differ about it."""
    tokens: list[Token] = []
    groups: list[str] = []
    at = 0
    while at < len(pattern):
        match = _TOKEN.match(pattern, at)
        if match is None:
            raise UnknownSyntax(
                f"{pattern[at : at + 10]!r} is not in ECMA-262, or needs a backslash"
            )
        token = _token_of(match, groups)
        if isinstance(token, Repeat) and not _is_repeatable(tokens):
            raise UnknownSyntax("what is repeated is no character and no group")
        tokens.append(token)
        at = match.end()
    if groups:
        raise UnknownSyntax("a parenthesis is never closed")
    return tokens


def _token_of(match: re.Match[str], groups: list[str]) -> Token:
    """``groups``: the kinds of those that are open."""
    if match["open"] is not None:
        if match["name"] is not None and not match["name"].isidentifier():
            raise UnknownSyntax("a group's name is not an identifier")
        groups.append("" if match["name"] else match["open"][1:])
        if len(groups) > MAX_DEPTH:
            raise UnknownSyntax(f"groups are nested more than {MAX_DEPTH} deep")
        return Open(groups[-1])
    if match["close"]:
        if not groups:
            raise UnknownSyntax("a parenthesis closes that was never opened")
        return Close(groups.pop())
    if match["or"]:
        return Or()
    if match["dot"]:
        return Dot()
    if match["assertion"]:
        return Assertion(match["assertion"])
    if match["backreference"]:
        return Backreference(match["backreference"].removeprefix("k<").removesuffix(">"))
    if match["repeat"]:
        return _repeat(match)
    if match["class"] is not None:
        return CharacterSet(_members(match["class"]), bool(match["negated"]), is_class=True)
    return CharacterSet((_item(match),))


def _is_repeatable(before: list[Token]) -> bool:
    last = before[-1] if before else None
    if isinstance(last, Close):
        return last.kind in ("", "?:")
    return isinstance(last, CharacterSet | Dot | Backreference)


def _repeat(match: re.Match[str]) -> Repeat:
    bounds: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
    if match["least"]:
        least = int(match["least"])
        most = least if match["comma"] is None else int(match["most"]) if match["most"] else None
        if most is not None and most < least:
            raise UnknownSyntax("a repetition's bounds are the wrong way round")
        bounds[match["repeat"]] = least, most
    return Repeat(*bounds[match["repeat"]], lazy=bool(match["lazy"]))


def _members(text: str) -> tuple[str | tuple[int, int], ...]:
    """The content between brackets."""
    matches = list(_MEMBER.finditer(text))
    if sum(len(match[0]) for match in matches) < len(text):
        raise UnknownSyntax(f"[{text}] has an escape that is not in ECMA-262")
    members: list[str | tuple[int, int]] = []
    while matches:
        first = _item(matches.pop(0))
        if len(matches) > 1 and matches[0][0] == "-":
            last = _item(matches[1])
            del matches[:2]
            if isinstance(first, str) or isinstance(last, str) or last < first:
                raise UnknownSyntax("a range of characters has no such ends")
            first = (first[0], last[1])
        members.append(first)
    return tuple(members)


def _item(match: re.Match[str]) -> str | tuple[int, int]:
    """An escape that means a set, or one code point as a range."""
    if match.lastgroup == "literal":  # by far the most
        return ord(match[0]), ord(match[0])
    found = {name: text for name, text in match.groupdict().items() if text}
    if "set" in found:
        return found["set"]
    if "high" in found:
        code = 0x10000 + (int(found["high"], 16) - 0xD800) * 0x400 + int(found["low"], 16) - 0xDC00
    elif digits := found.get("long") or found.get("short") or found.get("byte"):
        code = int(digits, 16)
    elif "letter" in found:
        code = ord(found["letter"]) % 32
    elif "control" in found:
        code = ord(_CONTROLS[found["control"]])
    else:
        code = 8 if "backspace" in found else ord(found["itself"])
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise UnknownSyntax(f"{match[0]!r} is no character")
    return code, code
