"""Writes texts as terminals of a Lark grammar, and reads the rules of a grammar in llguidance's dialect of
Lark, as far as it takes to see what each rule needs.

llguidance itself reports neither a rule without a finite sentence nor an attribute without effect.
The reader takes any text: what is no grammar is left to llguidance, which says so.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from radixrt.constrained.errors import CannotCompile
from radixrt.constrained.finite import cause_of, endless_symbols

TERMINALS = """
ANY: /(?s:.*)/
SOME: /(?s:.+)/
"""
"""Terminals of any text, which each grammar with a :class:`LarkText` must define."""


class LarkText:
    """The lines of a grammar, the terminals of its texts, and the grammars that it refers to."""

    def __init__(self, control: Mapping[str, int]) -> None:
        """
        Args:
            control: token ids of the control tokens, by their names.
        """
        self.lines: list[str] = []
        """Definitions of rules and terminals."""
        self.named: list[dict[str, Any]] = []
        """The other grammars, with the names by which the lines refer to them."""
        self._control = control
        self._names = _any_of(tuple(control)) if control else None
        self._numbers = itertools.count()

    def number(self) -> int:
        """A number for a name that no other definition has."""
        return next(self._numbers)

    def without(self, excludes: tuple[str, ...]) -> str:
        """A terminal of text without some texts in it."""
        name = f"FREE_{self.number()}"
        self.lines.append(f"{name}: SOME{none_of(excludes)}")
        return name

    def until(self, ends: tuple[str, ...], stops: tuple[str, ...]) -> str:
        """Text up to the first end, without any of the stops; and the end."""
        if len(ends) == 1 and self.names_control_token(ends[0]):
            letters, control = self._split_at_control_token(ends[0])
            if not letters:  # no text has such a token in it
                return f"{self.without(stops)}? {self.literal(control)}"
            name = f"UNTIL_{self.number()}"
            self.lines.append(f"{name}: (ANY {quoted(letters)}){none_of(stops)}")
            return f"{name} {self.literal(control)}"
        if any(map(self.names_control_token, ends)):
            raise CannotCompile(
                "Of several ends none can have a control token in it; give one end."
            )
        name, end = f"UNTIL_{self.number()}", "(" + " | ".join(map(quoted, ends)) + ")"
        self.lines.append(f"{name}: (ANY {end}) & ~(ANY {end} SOME){none_of(stops)}")
        return name

    def ended(self, text: str, end: str) -> str:
        """Content and end as one terminal, so that every way to divide the text between them is
        tried; a control token in the end begins a terminal of its own."""
        letters, control = self._split_at_control_token(end)
        name = f"TEXT_{self.number()}"
        self.lines.append(f"{name}: {text} {quoted(letters) if letters else ''}")
        return f"{name} {self.literal(control)}"

    def _split_at_control_token(self, text: str) -> tuple[str, str]:
        """The text before the first control token, and the rest."""
        found = self._names.search(text) if self._names else None
        first = found.start() if found else len(text)
        return text[:first], text[first:]

    def names_control_token(self, text: str) -> bool:
        return self._names is not None and self._names.search(text) is not None

    def literal(self, text: str) -> str:
        """A fixed text as a sequence of terminals; control tokens by their ids."""
        if not text:
            return ""
        pieces = self._names.split(text) if self._names else [text]
        return " ".join(
            f"<[{self._control[piece]}]>" if piece in self._control else quoted(piece)
            for piece in pieces
            if piece
        )


@functools.lru_cache(maxsize=4)
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """Some models have thousands of control tokens, and a set of tools has hundreds of texts."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def none_of(texts: tuple[str, ...]) -> str:
    """The condition on a terminal that none of the texts occurs in it."""
    listed = " | ".join(map(quoted, dict.fromkeys(texts)))
    return f" & ~(ANY ({listed}) ANY)" if texts else ""


def repeated(item: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"{item}{{{least},{'' if most is None else most}}}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regular expression between slashes."""
    return "/(" + re.sub(r"(\\.)|/", lambda m: m[1] or r"\/", pattern, flags=re.DOTALL) + ")/"


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
    """The pattern with ``\\d``, ``\\w`` and ``\\s`` as in ECMA-262, and so as in the patterns of
    JSON schemas; in the engines that read the pattern they hold the digits, letters and blanks of
    all scripts. A class stands inside a class, too.

    >>> with_ecma_classes(r"\\d[a\\D]\\\\d")
    '[0-9][a[^0-9]]\\\\\\\\d'
    """
    return re.sub(r"\\(.)", _class_of, pattern, flags=re.DOTALL)


def _class_of(escape: re.Match[str]) -> str:
    members = _CLASSES.get(escape[1].lower())
    if members is None:
        return escape[0]
    return members if escape[1].islower() else "[^" + members[1:]


TOKEN = re.compile(
    r"""(?://|\#)[^\n]*|[ \t\r]+                       # comments and blanks
    |(?P<newline>\n)
    |(?P<terminal>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\])+/\w*|<[^<>\s]+>|@[\w-]+|_?[A-Z][_A-Z0-9-]*|[+-]?[0-9]\w*)
    |(?P<name>[!?]{0,2}_?[a-z][\w-]*)
    |(?P<mark>%[a-z]+|::|\.\.|->|.)""",
    re.VERBOSE | re.DOTALL,
)
"""The tokens of a grammar; comments and blanks have no group."""
_BLANK = re.compile(r"\s*")
_END = ("", "\n")
_CLOSING = ("|", ")", "]", "}", "->")


def check_lark(text: str) -> None:
    """Raises CannotCompile if a rule that can be reached has no finite sentence, an attribute has
    no effect here, or a schema would be enforced without checks."""
    if "%json" in text:
        raise CannotCompile(
            "It has %json, by which a schema would get around the checks of keywords; ask for a structural tag whose content is "
            "the schema."
        )
    if (endless := endless_rule(text)) is not None:
        raise CannotCompile(
            f"The rule {endless!r} has no finite text: each of its alternatives needs the rule again. Give it an alternative "
            "without."
        )


def endless_rule(text: str) -> str | None:
    """An endless rule that can be reached, the cause if others need it; None if there is none."""
    reader = _Reader(text)
    reader.grammar("")

    def needs(name: str) -> list[list[str]]:
        return reader.needs.get(name, [])  # llguidance refuses names without a rule

    if not (endless := endless_symbols(["start"], needs)):
        return None
    cause = cause_of(endless, needs)
    name = cause if "#" not in cause else next(each for each in endless if "#" not in each)
    return name.rpartition("/")[2]


class _Reader:
    """Collects what each rule needs. A group in parentheses is a rule with ``#`` in its name."""

    def __init__(self, text: str) -> None:
        self.needs: dict[str, list[list[str]]] = {}
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._scope = ""
        self._numbers = itertools.count()
        self._tokenize()

    def _tokenize(self) -> None:
        position = 0
        while position < len(self._text):
            match = TOKEN.match(self._text, position)
            assert match, "the last alternative takes any character"
            position = match.end()
            kind = match.lastgroup
            if kind is None:
                continue
            self._tokens.append((kind, match[0]))
            if match[0] in ("%regex", "%json", "%llguidance"):
                position = _after_json(self._text, position)

    # ------------------------------------------------------------ tokens

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    @property
    def _next(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, *texts: str) -> bool:
        is_there = self._next in texts and self._at < len(self._tokens)
        self._at += is_there
        return is_there

    def _skip_to(self, *texts: str) -> None:
        while self._next not in (*texts, ""):
            self._at += 1

    # ------------------------------------------------------------ rules

    def grammar(self, scope: str) -> None:
        """Read rules up to the end of the text, or to the brace that closes a nested grammar."""
        outer, self._scope = self._scope, scope
        while self._next and self._next != "}":
            if self._kind == "name":
                self._rule()
            else:  # a terminal, or a statement
                self._skip_to("\n")
            self._take("\n")
        self._scope = outer

    def _rule(self) -> None:
        name = self._scope + self._next.lstrip("!?")
        self._at += 1
        while self._next not in (":", *_END):
            if self._take("temperature"):
                raise CannotCompile(
                    f"The rule {name.rpartition('/')[2]!r} has a temperature, which has no effect here; leave it out, and set "
                    "the temperature of the request."
                )
            self._at += 1
        self._take(":")
        self.needs[name] = self._alternatives()

    def _alternatives(self) -> list[list[str]]:
        """What is needed: one of the alternatives."""
        found = [self._sequence()]
        while self._take("|") or self._takes_bar_on_next_line():
            found.append(self._sequence())
        return [found]

    def _takes_bar_on_next_line(self) -> bool:
        before = self._at
        while self._take("\n"):
            pass
        if self._take("|"):
            return True
        self._at = before
        return False

    def _sequence(self) -> str:
        parts: list[list[str]] = []
        while self._next not in (*_END, *_CLOSING):
            if (part := self._expression()) is not None:
                parts.append([part])
        if self._take("->"):
            self._at += 1
        return self._named(parts)

    def _named(self, needs: list[list[str]]) -> str:
        name = f"{self._scope}#{next(self._numbers)}"
        self.needs[name] = needs
        return name

    def _expression(self) -> str | None:
        """The rule that an atom with its operators needs; None for a terminal."""
        is_optional = False
        kind, text = self._kind, self._next
        self._at += 1
        part = None
        if text in ("(", "[") and kind == "mark":
            part = self._named(self._alternatives())
            self._take(")", "]")
            is_optional = text == "["
        elif text == "%lark" and self._take("{"):
            scope = f"{self._scope}{next(self._numbers)}/"
            self.grammar(scope)
            self._take("}")
            part = f"{scope}start"
        elif text == "%if":
            self._skip_call()
        elif kind == "name":
            part = self._scope + text
            if self._take("::"):
                self._skip_call()
        is_optional |= self._may_be_absent()
        return self._named([[part, self._named([])]]) if part and is_optional else part

    def _may_be_absent(self) -> bool:
        """Whether an operator follows that allows no occurrence."""
        if self._take("?", "*"):
            return True
        if self._take("~"):
            least = self._next
            self._at += 1
            if self._take(".."):
                self._at += 1
            return least == "0"
        if self._take("{"):
            least = self._next
            self._skip_to("}", "\n")
            self._take("}")
            return least in ("0", ",")
        self._take("+")
        return False

    def _skip_call(self) -> None:
        """Skip the parameter or condition of a rule with parameters: a name, and what is in
        parentheses after it."""
        self._at += 1
        if not self._take("("):
            return
        depth = 1
        while depth and self._next:
            depth += (self._next == "(") - (self._next == ")")
            self._at += 1


def _after_json(text: str, position: int) -> int:
    """The position behind the JSON value that stands there."""
    blank = _BLANK.match(text, position)
    position = blank.end() if blank else position
    try:
        return json.JSONDecoder().raw_decode(text, position)[1]
    except ValueError:
        return position
