"""Which JSON values are equal, of which type is one, and does a pattern surely match a text?"""

import functools
import re
from collections.abc import Iterable
from typing import Any

Key = tuple[Any, ...]


def value_key(value: Any) -> Key:
    """Equal for exactly the values that JSON schema calls equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, bool) or value is None:
        return ("literal", value)
    if isinstance(value, int | float):
        return ("number", value)  # Python compares and hashes 1 and 1.0 alike
    if isinstance(value, str):
        return ("string", value)
    if isinstance(value, list):
        return ("array", tuple(map(value_key, value)))
    return ("object", frozenset((name, value_key(item)) for name, item in value.items()))


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order in which they first come."""
    return list({value_key(value): value for value in reversed(list(values))}.values())[::-1]


def type_of(value: Any) -> str:
    """The one of ``TYPES`` that a value has."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def is_integral(value: int | float) -> bool:
    """Is this number an integer in JSON schema's sense, as 1.0 is?"""
    return isinstance(value, int) or value.is_integer()


_OTHER_DIALECT = re.compile(
    r"\(\?[^:=!<]|\(\?<[^=!]|\[\^?\]|\\[AZzGBbckxuUpPNQE0-9]|\{,|[*+?}]\+|\\[wWdDsS].*-|\[\["
)
"""What Python's ``re`` reads in another way than ECMA-262, or where it takes thought to tell."""


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    if not pattern.isascii() or _OTHER_DIALECT.search(pattern):
        return None
    try:
        return re.compile(pattern, re.ASCII)
    except (re.error, RecursionError, OverflowError):
        return None


def matches(pattern: str, text: str) -> bool | None:
    """Does an ECMA-262 pattern match somewhere in a text? None where that is not certain.

    Texts are short and the pattern is the user's: only those that can't take long to match are tried.
    """
    compiled = _compiled(pattern)
    if compiled is None or not is_plain(text) or _may_be_slow(pattern, text):
        return None
    return compiled.search(text) is not None


def is_plain(text: str) -> bool:
    """A text that Python's patterns and ECMA-262's see alike: ASCII and of one line."""
    return text.isascii() and text.isprintable()


_REPEATED_REPEAT = re.compile(r"[*+}?][^(]*\)[*+{]|[*+}]\)")


def _may_be_slow(pattern: str, text: str) -> bool:
    """Nested repetitions may take exponential time; five repetitions over a long text a polynomial one."""
    if len(pattern) > 1000 or len(text) > 1000:
        return True
    repeats = sum(pattern.count(sign) for sign in "*+{")
    if _REPEATED_REPEAT.search(pattern):
        return len(text) > 20
    return repeats > 3 and len(text) ** min(repeats, 6) > 10**10


def anything_but(texts: Iterable[str]) -> str:
    """A pattern, without look-around, of all texts but these, which must not contain line feeds.

    It follows the tree of their prefixes: a text is another one if it leaves the tree, or ends at an inner
    node of it.
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
    if node:
        others = f"[^{''.join(_in_class(char) for char in sorted(node))}][\\s\\S]*"
    else:
        others = "[\\s\\S]+"
    ways = [others]
    for char, below in node.items():
        ways.append(f"{_literal(char)}(?:{_leaving(below, prefix + char, denied)})")
    if prefix not in denied:
        ways.insert(0, "")
    return "|".join(ways)


def _literal(char: str) -> str:
    return "\\" + char if char in "^$\\.*+?()[]{}|/" else char


def _in_class(char: str) -> str:
    return "\\" + char if char in "^]\\[-" else char
