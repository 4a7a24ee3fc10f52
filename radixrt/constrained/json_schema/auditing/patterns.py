"""Lists the constructs of a ``pattern`` that engines were seen to treat differently."""

import functools
from collections.abc import Iterator

from radixrt.constrained.json_schema.ecma_regex import (
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

LONG_REPEAT = 1000
"""Repetitions beyond this are a feature of their own: engines limit the size of their automata."""

_GROUPS = {
    "": "group", "?:": "group", "?=": "lookahead", "?!": "lookahead", "?<=": "lookbehind", "?<!": "lookbehind",
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def pattern_features(pattern: str) -> frozenset[str]:
    """The constructs that the pattern uses, by name; ``unknown-syntax`` alone where it can't be read."""
    try:
        tokens = parse(pattern)
    except UnknownSyntax:
        return frozenset({"unknown-syntax"})
    found, depth = {"literal"}, 0
    for before, token, after in zip([Or(), *tokens], tokens, [*tokens[1:], Or()], strict=False):
        depth += isinstance(token, Open) - isinstance(token, Close)
        if token in (Assertion("^"), Assertion("$")):
            beside = before if token == Assertion("^") else after
            is_at_edge = depth == 0 and isinstance(beside, Or)
            found.add("anchor" if is_at_edge else "anchor-inside")
        found.update(_features_of(token))
    return frozenset(found)


def _features_of(token: Token) -> Iterator[str]:
    match token:
        case Or():
            yield "alternation"
        case Dot():
            yield "dot"
        case Assertion("\\b" | "\\B"):
            yield "word-boundary"
        case Backreference():
            yield "backreference"
        case Open(kind):
            yield _GROUPS[kind]
        case CharacterSet():
            yield from _features_of_set(token)
        case Repeat(least, most, lazy):
            yield "lazy" if lazy else "repeat"
            if max(least, most or 0) > LONG_REPEAT:
                yield "long-repeat"


def _features_of_set(token: CharacterSet) -> Iterator[str]:
    if token.is_class or isinstance(token.items[0], str):
        yield "negated-class" if token.negated else "class"
    if not token.items:
        yield "empty-class"
    for item in token.items:
        if isinstance(item, str):
            yield "property" if item[0] in "pP" else f"escape-{item}"
            if token.negated and item in "DWS":
                yield "negated-complement"  # has no portable form
            continue
        if len(token.items) == 1 and item[0] == item[1] < 0x20 and chr(item[0]) not in "\b\t\n\f\r":
            yield "character-unwritable"
        elif item[0] < 0x20:
            yield "character-control"
        elif item[1] > 0x7E:
            yield "character-beyond-ascii"
