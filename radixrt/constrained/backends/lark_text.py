"""Writes texts as terminals of a Lark grammar, and as regular expressions."""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from radixrt.constrained.errors import CannotCompile

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
