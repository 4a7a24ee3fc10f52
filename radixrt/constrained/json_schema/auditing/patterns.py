"""How is a ``pattern`` written so that every engine reads it alike, and what constructs does it use?

ECMA-262, Python and Rust differ about ``\\d``, ``\\w``, ``\\s`` and the dot. They are spelled out as the
characters on which all three agree, so a string that matches the portable form matches the pattern under
each reading.
"""

from collections.abc import Iterator

from radixrt.constrained.json_schema.ecma_regex import (
    SYNTAX_CHARACTERS,
    Alternatives,
    AnyCharacter,
    Assertion,
    Backreference,
    CharacterClass,
    Escape,
    Group,
    Literal,
    Node,
    Repeat,
    UnknownSyntax,
    parse,
)

LONG_REPEAT = 1000
"""Repetitions beyond this are a feature of their own: engines limit the size of their automata."""

_SPACES_OF_ALL = r"\t\n\x0b\f\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACES_OF_ANY = r"\t-\r\x1c- \x85\xa0\u1680\u180e\u2000-\u200b\u2028\u2029\u202f\u205f\u3000\ufeff"

_CERTAINLY = {
    "d": "0-9",
    "w": "A-Za-z0-9_",
    "s": _SPACES_OF_ALL,
    "D": r"[^\p{Nd}]",
    "W": r"[^\p{L}\p{N}\p{M}\p{Pc}]",
    "S": f"[^{_SPACES_OF_ANY}]",
}
"""Inside a class: characters of which every engine says that they belong."""
_POSSIBLY = {
    "d": r"\p{Nd}",
    "w": r"\p{L}\p{N}\p{M}\p{Pc}",
    "s": _SPACES_OF_ANY,
    "D": "[^0-9]",
    "W": "[^A-Za-z0-9_]",
    "S": f"[^{_SPACES_OF_ALL}]",
}
"""Inside a negated class: characters of which any engine says that they belong."""
_LINE_ENDS = r"\n\r\u2028\u2029"


def portable(pattern: str) -> str:
    """The pattern in the form that grammars are given; what it matches, the pattern matches.

    Raises:
        UnknownSyntax: the pattern is not ECMA-262, engines differ about it, or it holds a backreference.
    """
    return _write(parse(pattern))


def pattern_features(pattern: str) -> frozenset[str]:
    """The constructs that the pattern uses, by name; ``unknown-syntax`` alone where it can't be read."""
    try:
        tree = parse(pattern)
    except UnknownSyntax:
        return frozenset({"unknown-syntax"})
    return frozenset(_features_of(tree, at_edge=True))


def _features_of(alternatives: Alternatives, at_edge: bool) -> Iterator[str]:
    yield "literal"
    if len(alternatives.sequences) > 1:
        yield "alternation"
    for sequence in alternatives.sequences:
        for index, node in enumerate(sequence):
            first, last = index == 0, index == len(sequence) - 1
            yield from _features_of_node(node, at_edge and first, at_edge and last)


def _features_of_node(node: Node, first: bool, last: bool) -> Iterator[str]:
    match node:
        case Literal(character):
            yield from _features_of_character(ord(character))
        case AnyCharacter():
            yield "dot"
        case CharacterClass(negated, items):
            yield from _features_of_class(negated, items)
        case Assertion(kind):
            yield _assertion_feature(kind, first, last)
        case Backreference():
            yield "backreference"
        case Group(opening, body):
            yield _GROUPS[opening]
            yield from _features_of(body, at_edge=first and last)
        case Repeat(item, least, most, lazy):
            yield "lazy" if lazy else "repeat"
            if max(least, most or 0) > LONG_REPEAT:
                yield "long-repeat"
            yield from _features_of_node(item, False, False)


_GROUPS = {
    "": "group",
    "?:": "group",
    "?=": "lookahead",
    "?!": "lookahead",
    "?<=": "lookbehind",
    "?<!": "lookbehind",
}


def _assertion_feature(kind: str, first: bool, last: bool) -> str:
    if kind in "bB":
        return "word-boundary"
    return "anchor" if (first if kind == "^" else last) else "anchor-inside"


def _features_of_class(negated: bool, items: tuple[Escape | tuple[int, int], ...]) -> Iterator[str]:
    yield "negated-class" if negated else "class"
    if not items:
        yield "empty-class"
    if len(items) == 1 and isinstance(items[0], tuple) and items[0][0] == items[0][1]:
        yield from _features_of_character(items[0][0])
    for item in items:
        if isinstance(item, Escape):
            yield "property" if item.name[0] in "pP" else f"escape-{item.name}"
        elif item[0] < 0x20:
            yield "character-control"
        elif item[1] > 0x7E:
            yield "character-beyond-ascii"


def _features_of_character(code: int) -> Iterator[str]:
    if code < 0x20:
        yield "character-control" if chr(code) in "\b\t\n\f\r" else "character-unwritable"
    elif code > 0x7E:
        yield "character-beyond-ascii"


# ---------------------------------------------------------------- writing


def _write(alternatives: Alternatives) -> str:
    return "|".join("".join(map(_write_node, sequence)) for sequence in alternatives.sequences)


def _write_node(node: Node) -> str:
    match node:
        case Literal(character):
            return _write_character(ord(character))
        case AnyCharacter():
            return f"[^{_LINE_ENDS}]"
        case CharacterClass(negated, items):
            return _write_class(negated, items)
        case Assertion(kind):
            return kind if kind in "^$" else "\\" + kind
        case Backreference():
            raise UnknownSyntax("no grammar can express a backreference")
        case Group(opening, body):
            return f"({opening or '?:'}{_write(body)})"
        case Repeat(item, least, most, lazy):
            return _write_node(item) + _write_bounds(least, most) + ("?" if lazy else "")


def _write_bounds(least: int, most: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    if (least, most) in short:
        return short[least, most]
    if least == most:
        return f"{{{least}}}"
    return f"{{{least},{'' if most is None else most}}}"


def _write_class(negated: bool, items: tuple[Escape | tuple[int, int], ...]) -> str:
    known = _POSSIBLY if negated else _CERTAINLY
    members = []
    for item in items:
        if isinstance(item, Escape):
            members.append(known.get(item.name) or "\\" + item.name)
        else:
            low, high = map(_write_character, item)
            members.append(low if low == high else f"{low}-{high}")
    if not negated and len(members) == 1 and members[0].startswith("["):
        return members[0]
    return f"[{'^' if negated else ''}{''.join(members)}]"


def _write_character(code: int) -> str:
    character = chr(code)
    if character in SYNTAX_CHARACTERS or character in "-&~":
        return "\\" + character
    if " " <= character <= "~" or code >= 0xA0:
        return character
    return f"\\x{code:02x}"
