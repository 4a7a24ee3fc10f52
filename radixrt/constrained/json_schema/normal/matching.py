"""Decides whether a pattern certainly matches a text; writes patterns of all texts but some."""

import functools
import re
from collections.abc import Iterable
from typing import Any

from radixrt.constrained.json_schema.dialects import python_pattern
from radixrt.constrained.json_schema.ecma_regex import SYNTAX_CHARACTERS, UnknownSyntax

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
