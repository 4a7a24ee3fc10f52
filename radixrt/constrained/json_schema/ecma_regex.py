"""What does a ``pattern`` say? A parser of ECMA-262 regular expressions, as JSON schema uses them.

Escapes that engines read differently (``\\Z``, ``\\h``) and syntax that ECMA-262 does not have raise
:class:`UnknownSyntax`: such a pattern is never handed to a grammar.
"""

from dataclasses import dataclass, field

SYNTAX_CHARACTERS = frozenset("^$\\.*+?()[]{}|/")
_CONTROL_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_HEX_LENGTHS = {"x": 2, "u": 4}


class UnknownSyntax(ValueError):
    """The text is not a pattern that all engines read alike."""


@dataclass(frozen=True)
class Escape:
    """A character class escape: ``d D w W s S``, or a Unicode property such as ``p{L}``."""

    name: str


@dataclass(frozen=True)
class CharacterClass:
    """One character of a set."""

    negated: bool
    items: tuple[Escape | tuple[int, int], ...]
    """Escapes, and ranges of code points with both ends included."""


@dataclass(frozen=True)
class Literal:
    character: str


@dataclass(frozen=True)
class AnyCharacter:
    """The dot."""


@dataclass(frozen=True)
class Assertion:
    """``^``, ``$``, ``b`` or ``B``."""

    kind: str


@dataclass(frozen=True)
class Backreference:
    name: str


@dataclass(frozen=True)
class Group:
    """A group; ``opening`` is what stands after the parenthesis: empty, ``?:``, ``?=``, ``?!``, ``?<=``, ``?<!``."""

    opening: str
    body: "Alternatives"


@dataclass(frozen=True)
class Repeat:
    item: "Node"
    least: int
    most: int | None
    lazy: bool


Node = Literal | AnyCharacter | CharacterClass | Assertion | Backreference | Group | Repeat


@dataclass(frozen=True)
class Alternatives:
    """One or more sequences."""

    sequences: tuple[tuple[Node, ...], ...]


def parse(pattern: str) -> Alternatives:
    """Read a pattern.

    Raises:
        UnknownSyntax: it is not ECMA-262, or engines differ about it.
    """
    parser = _Parser(pattern)
    result = parser.alternatives()
    if parser.rest():
        raise UnknownSyntax("a parenthesis closes that was never opened")
    return result


@dataclass
class _Parser:
    text: str
    at: int = 0
    depth: int = field(default=0)

    def rest(self) -> bool:
        return self.at < len(self.text)

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def take(self, length: int = 1) -> str:
        taken = self.peek(length)
        if len(taken) < length:
            raise UnknownSyntax("the pattern ends too early")
        self.at += length
        return taken

    def take_if(self, wanted: str) -> bool:
        if self.text.startswith(wanted, self.at):
            self.at += len(wanted)
            return True
        return False

    def take_until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise UnknownSyntax(f"{end!r} is missing")
        taken, self.at = self.text[self.at : stop], stop + len(end)
        return taken

    def alternatives(self) -> Alternatives:
        self.depth += 1
        if self.depth > 100:
            raise UnknownSyntax("groups are nested more than 100 deep")
        sequences: list[tuple[Node, ...]] = []
        while True:
            sequence: list[Node] = []
            while self.rest() and self.peek() not in "|)":
                sequence.append(self.quantified(self.atom()))
            sequences.append(tuple(sequence))
            if not self.take_if("|"):
                break
        self.depth -= 1
        return Alternatives(tuple(sequences))

    def atom(self) -> Node:
        character = self.take()
        match character:
            case "(":
                return self.group()
            case "[":
                return self.character_class()
            case ".":
                return AnyCharacter()
            case "^" | "$":
                return Assertion(character)
            case "\\":
                return self.escape()
            case "*" | "+" | "?" | "{" | "]":
                raise UnknownSyntax(f"{character!r} needs a backslash here")
        return Literal(character)

    def group(self) -> Group:
        opening = ""
        if self.take_if("?"):
            opening = next((k for k in ("?:", "?=", "?!", "?<=", "?<!") if self.take_if(k[1:])), "")
            if not opening:
                if not self.take_if("<"):
                    raise UnknownSyntax(f"'(?{self.peek()}' is not in ECMA-262")
                if not self.take_until(">").isidentifier():
                    raise UnknownSyntax("a group's name is not an identifier")
        body = self.alternatives()
        if not self.take_if(")"):
            raise UnknownSyntax("a parenthesis is never closed")
        return Group(opening, body)

    def quantified(self, item: Node) -> Node:
        bounds = self.bounds()
        if bounds is None:
            return item
        if isinstance(item, Assertion) or (
            isinstance(item, Group) and item.opening not in ("", "?:")
        ):
            raise UnknownSyntax("an assertion is repeated")
        lazy = self.take_if("?")
        if self.peek() in ("*", "+", "?"):
            raise UnknownSyntax("a repetition is repeated")
        return Repeat(item, *bounds, lazy)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take_if(sign):
                return bounds
        if not self.take_if("{"):
            return None
        least, comma, most = self.take_until("}").partition(",")
        if not least.isdecimal() or not (most == "" or most.isdecimal()) or not least.isascii():
            raise UnknownSyntax("a repetition is not {n}, {n,} or {n,m}")
        if not comma:
            return int(least), int(least)
        if most and int(most) < int(least):
            raise UnknownSyntax("a repetition's bounds are the wrong way round")
        return int(least), int(most) if most else None

    def escape(self) -> Node:
        character = self.peek()
        if character in ("b", "B"):
            return Assertion(self.take())
        if character in "123456789" and character:
            digits = self.take()
            while self.peek().isdecimal():
                digits += self.take()
            return Backreference(digits)
        if self.take_if("k<"):
            return Backreference(self.take_until(">"))
        member = self.class_escape()
        if isinstance(member, Escape):
            return CharacterClass(False, (member,))
        return Literal(chr(member))

    def class_escape(self) -> Escape | int:
        """What stands after a backslash, inside a class or outside: an escape or a code point."""
        character = self.take()
        if character in "dDwWsS":
            return Escape(character)
        if character in "pP":
            if not self.take_if("{"):
                raise UnknownSyntax("\\p needs braces")
            return Escape(character + "{" + self.take_until("}") + "}")
        if character in _CONTROL_ESCAPES:
            return ord(_CONTROL_ESCAPES[character])
        if character == "0" and not self.peek().isdecimal():
            return 0
        if character == "c" and self.peek().isascii() and self.peek().isalpha():
            return ord(self.take()) % 32
        if character in _HEX_LENGTHS:
            return self.code_point(character)
        if character.isascii() and character.isalnum():
            raise UnknownSyntax(f"\\{character} is not in ECMA-262")
        return ord(character)

    def code_point(self, kind: str) -> int:
        if kind == "u" and self.take_if("{"):
            return _hexadecimal(self.take_until("}"))
        high = _hexadecimal(self.take(_HEX_LENGTHS[kind]))
        if 0xD800 <= high < 0xDC00 and self.take_if("\\u"):
            low = _hexadecimal(self.take(4))
            if 0xDC00 <= low < 0xE000:
                return 0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00
        if 0xD800 <= high < 0xE000:
            raise UnknownSyntax("half of a surrogate pair stands alone")
        return high

    def character_class(self) -> CharacterClass:
        negated = self.take_if("^")
        items: list[Escape | tuple[int, int]] = []
        while not self.take_if("]"):
            first = self.class_member()
            if self.peek() == "-" and self.peek(2) not in ("-]", "-"):
                self.take()
                last = self.class_member()
                if isinstance(first, Escape) or isinstance(last, Escape) or last < first:
                    raise UnknownSyntax("a range of characters has no such ends")
                items.append((first, last))
            elif isinstance(first, Escape):
                items.append(first)
            else:
                items.append((first, first))
        return CharacterClass(negated, tuple(items))

    def class_member(self) -> Escape | int:
        if self.take_if("\\"):
            if self.take_if("b"):
                return 8
            return self.class_escape()
        return ord(self.take())


def _hexadecimal(digits: str) -> int:
    try:
        value = int(digits, 16)
    except ValueError:
        raise UnknownSyntax(f"{digits!r} is not hexadecimal") from None
    if value > 0x10FFFF or not digits.isalnum():
        raise UnknownSyntax(f"{digits!r} is not a code point")
    return value
