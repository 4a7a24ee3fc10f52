"""Writes an EBNF grammar as a Lark grammar of llguidance, character by character.

llguidance cuts a text into lexemes, each as long as it can be, so ``[a-z]* "abc"`` with ``"abc"``
as one lexeme would take nothing. No character is the beginning of another. So where each lexeme is
one character, the parser alone decides, as EBNF means it.
"""

import re
from collections.abc import Iterator

from radixrt.constrained.backends.lark import endless_rule, quoted
from radixrt.constrained.errors import CannotCompile

MAX_NESTING = 200
"""Groups within one another."""

_TOKEN = re.compile(
    r"""(?P<blank>\s++|\#[^\n]*+)
    |"(?P<literal>(?:\\.|[^"\\\n])*+)"
    |\[(?P<negated>\^?)(?P<members>(?:\\.|[^\]\\])*+)\]
    |\{\s*+(?P<least>\d{0,9}+)\s*+(?P<comma>,?)\s*+(?P<most>\d{0,9}+)\s*+\}
    |(?P<rule>[\w.-]++)(?=\s*+::=)|(?P<is>::=)
    |(?P<any>\.+(?![\w-]))|(?P<name>[\w.-]++)
    |(?P<mark>[()|*+?])""",
    re.VERBOSE | re.DOTALL,
)
"""The tokens of EBNF, in linear time."""
_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([nrt])|([^\w\s]))|([^\\])",
    re.DOTALL,
)
"""A character of a literal or a class: its code in hexadecimal digits, the letter of an escape, or
the character itself."""
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_ANY = "/(?s:.)/"


def lark_of_ebnf(text: str) -> str:
    r"""The Lark grammar of a grammar in GBNF, the EBNF of llama.cpp and xgrammar; it begins with
    ``root``.

    >>> print(lark_of_ebnf('root ::= "ab"* | [^a-c\\n] word\nword ::= | "é"'))
    start: r0
    C0: /[^\x{61}-\x{63}\x{a}]/
    r0: ("a" "b")* | C0 r1
    r1: "" | "é"

    Raises:
        CannotCompile: it is no EBNF, or has a rule without a definition or without a finite text.
    """
    lark, names = _Translator(text).lark()
    if (endless := endless_rule(lark)) is not None:
        raise CannotCompile(
            f"The rule {names[endless]!r} has no finite text: each of its alternatives needs the rule again. Give it an "
            "alternative without."
        )
    return lark


class _Translator:
    """Reads tokens one after the other, and writes the Lark form of each."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, str] = {}
        """Names in Lark of the rules that are defined or named, by their names in EBNF."""
        self._bodies: dict[str, str] = {}
        """Bodies of the rules, by their names in Lark."""
        self._terminals: dict[str, str] = {}
        """Names of the classes of characters, by their regular expressions."""

    def lark(self) -> tuple[str, dict[str, str]]:
        """The grammar, and the names in EBNF by those in Lark."""
        self._read()
        names = {lark: name for name, lark in self._rules.items()}
        for lark, name in names.items():
            if lark not in self._bodies:
                raise CannotCompile(
                    f"The rule {name!r} is used and not defined; add a line {name} ::= …"
                )
        lines = [f"start: {self._rules['root']}"] if "root" in self._rules else []
        if not lines:
            raise CannotCompile("It has no rule 'root', with which a text begins; add one.")
        lines += [f"{name}: {pattern}" for pattern, name in self._terminals.items()]
        lines += [f"{lark}: {body}" for lark, body in self._bodies.items()]
        return "\n".join(lines), names | {"start": "root"}

    def _read(self) -> None:
        tokens = self._tokens()
        match = next(tokens, None)
        while match is not None:
            if match["rule"] is None:
                raise self._error(match.start(), "A rule must begin here, as name ::= …")
            lark = self._name(match["rule"])
            if lark in self._bodies:
                raise CannotCompile(f"The rule {match['rule']!r} is defined twice.")
            next(tokens)  # the sign ::=, as the pattern of a rule's name says
            self._bodies[lark], match = self._body(tokens)

    def _tokens(self) -> Iterator[re.Match[str]]:
        position = 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._error(position, "Here is something that is no EBNF")
            if match["blank"] is None:
                yield match
            position = match.end()

    def _body(self, tokens: Iterator[re.Match[str]]) -> tuple[str, re.Match[str] | None]:
        """The alternatives of a rule, and the token behind them."""
        open_groups: list[list[list[str]]] = [[[]]]
        """Each a list of alternatives, which are lists of parts; the innermost comes last."""
        for match in tokens:
            alternatives = open_groups[-1]
            if match["rule"] is not None:
                return self._closed(open_groups, match.start()), match
            if match["mark"] == "(":
                open_groups.append([[]])
                if len(open_groups) > MAX_NESTING:
                    raise CannotCompile(
                        f"More than {MAX_NESTING} groups are within one another; write some of them as rules."
                    )
            elif match["mark"] == ")":
                if len(open_groups) == 1:
                    raise self._error(match.start(), "No group is open that ends here")
                open_groups.pop()
                open_groups[-1][-1].append(f"({_alternatives(alternatives)})")
            elif match["mark"] == "|":
                alternatives.append([])
            elif match["mark"] is not None or match["least"] is not None:
                if not alternatives[-1]:
                    raise self._error(match.start(), "There is nothing before it to be repeated")
                alternatives[-1].append(self._repeated(alternatives[-1].pop(), match))
            else:
                alternatives[-1] += self._parts(match)
        return self._closed(open_groups, len(self._text)), None

    def _closed(self, open_groups: list[list[list[str]]], end: int) -> str:
        if len(open_groups) > 1:
            raise self._error(end, "A group is not closed here")
        return _alternatives(open_groups[0])

    def _repeated(self, part: str, match: re.Match[str]) -> str:
        is_one = part.isalnum() or (part[0] in '("' and part[-1] in ')"')
        part = part if is_one else f"({part})"
        if match["mark"] is not None:
            return part + match["mark"]
        least, most = int(match["least"] or "0"), int(match["most"] or "0")
        if not match["comma"]:
            most = least
        if not (match["least"] or match["most"]) or (match["most"] and most < least):
            raise self._error(
                match.start(), "Write a repetition as {2}, {2,} or {2,5}, the smaller number first"
            )
        if most == 0 and not (match["comma"] and not match["most"]):
            return '""'
        bound = "" if match["comma"] and not match["most"] else most
        return f"{part}{{{least},{bound}}}"

    def _parts(self, match: re.Match[str]) -> list[str]:
        if match["literal"] is not None:
            letters = [quoted(letter) for letter in self._characters(match, "literal")]
            return [f"({' '.join(letters)})" if len(letters) > 1 else "".join(letters) or '""']
        if match["any"] is not None:
            return [self._terminal(_ANY)] * len(match["any"])
        if match["members"] is not None:
            return [self._terminal(self._class(match))]
        if match["name"] is not None:
            return [self._name(match["name"])]
        raise self._error(match.start(), "A rule must begin with its name here")

    def _class(self, match: re.Match[str]) -> str:
        """The regular expression of a class of characters."""
        members = match["members"]
        if not members:
            raise self._error(match.start(), "The class has no characters")
        written, codes = "", [ord(letter) for letter in self._characters(match, "members")]
        plain = self._plain_hyphens(match)
        index = 0
        while index < len(codes):
            written += rf"\x{{{codes[index]:x}}}"
            if index + 2 < len(codes) and index + 1 in plain:
                if codes[index + 2] < codes[index]:
                    raise self._error(match.start(), "A range of the class ends before it begins")
                written += rf"-\x{{{codes[index + 2]:x}}}"
                index += 2
            index += 1
        return f"/[{match['negated']}{written}]/"

    @staticmethod
    def _plain_hyphens(match: re.Match[str]) -> set[int]:
        """Positions of the hyphens that are not escaped, among the characters of a class."""
        found = enumerate(_CHARACTER.finditer(match["members"]))
        return {index for index, each in found if each[0] == "-"}

    def _characters(self, match: re.Match[str], group: str) -> list[str]:
        text, start = match[group], match.start(group)
        characters, position = [], 0
        while position < len(text):
            one = _CHARACTER.match(text, position)
            if one is None:
                raise self._error(
                    start + position, 'The escape is unknown; write \\n, \\", \\x41 or \\u00e9'
                )
            code = one[1] or one[2] or one[3]
            value = (
                int(code, 16) if code else ord(_ESCAPES.get(one[4] or "", one[5] or one[6] or "\0"))
            )
            if value > 0x10FFFF or 0xD800 <= value <= 0xDFFF:
                raise self._error(start + position, "The escape stands for no character")
            characters.append(chr(value))
            position = one.end()
        return characters

    def _terminal(self, pattern: str) -> str:
        return self._terminals.setdefault(pattern, f"C{len(self._terminals)}")

    def _name(self, name: str) -> str:
        return self._rules.setdefault(name, f"r{len(self._rules)}")

    def _error(self, position: int, problem: str) -> CannotCompile:
        line = self._text.count("\n", 0, position) + 1
        excerpt = self._text[position : position + 20].partition("\n")[0]
        return CannotCompile(f"{problem}, in line {line}: {excerpt!r}.")


def _alternatives(alternatives: list[list[str]]) -> str:
    return " | ".join(" ".join(parts) or '""' for parts in alternatives)
