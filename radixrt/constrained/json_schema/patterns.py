"""Reads ``pattern``, an ECMA-262 regular expression, and writes it for other engines.

Escapes that engines read differently (``\\Z``, ``\\h``) and syntax that ECMA-262 does not have
raise :class:`UnknownSyntax`: such a pattern is never handed to a grammar. Engines differ about
``\\d``, ``\\w``, ``\\s``, the dot and the end; these are written as explicit classes.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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


ANYTHING = ("", ".*", "^.*", "^")
"""Patterns that match every text."""


_REPEATED_REPEAT = re.compile(r"[*+}?][^(]*\)[*+{]|[*+}]\)")


def matches(pattern: str, text: str) -> bool | None:
    """Whether an ECMA-262 pattern matches somewhere in a text; None where that is not certain.

    Texts are short and the pattern is the user's: only those that can't take long to match are
    tried.
    """
    compiled, longest = _compiled(pattern)
    if compiled is None or len(text) > longest:
        return None
    return compiled.search(text) is not None


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> tuple[re.Pattern[str] | None, int]:
    """The pattern and the longest text that it is tried on. Nested repetitions may take exponential
    time; five repetitions over a long text a polynomial one."""
    if len(pattern) > 1000:
        return None, 0
    try:
        compiled = re.compile(python_pattern(pattern))
    except UnknownSyntax:
        return None, 0
    if _REPEATED_REPEAT.search(pattern):
        return compiled, 20
    repeats = sum(pattern.count(sign) for sign in "*+{")
    return compiled, 1000 if repeats < 4 else int(10 ** (10 / min(repeats, 6)))


def anything_but(texts: Iterable[str]) -> str:
    """A pattern, without look-around, of all texts but these, which must not contain line feeds.

    It follows the tree of their prefixes: a text is another one if it leaves the tree, or ends at
    an inner node of it.
    """
    tree: dict[str, Any] = {}
    denied: set[str] = set()
    for text in texts:
        denied.add(text)
        node = tree
        for char in text:
            node = node.setdefault(char, {})
    return f"^(?:{_leaving(tree, '', denied)})$"


def _leaving(node: dict[str, Any], prefix: str, denied: set[str]) -> str:
    others = f"[^{''.join(map(_in_class, sorted(node)))}][\\s\\S]*" if node else "[\\s\\S]+"
    ways = [] if prefix in denied else [""]
    ways.append(others)
    for char, below in node.items():
        literal = "\\" + char if char in SYNTAX_CHARACTERS else char
        ways.append(f"{literal}(?:{_leaving(below, prefix + char, denied)})")
    return "|".join(ways)


def _in_class(char: str) -> str:
    return "\\" + char if char in "^]\\[-" else char
