"""How is a ``pattern`` written for Python's ``re``, so that a validator in Python reads it as ECMA-262 does?"""

import re

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


def python_pattern(pattern: str) -> str:
    """Digits, word characters and boundaries are ASCII's, ``$`` is the very end, the dot is no line end.

    Raises:
        UnknownSyntax: Python can't express it.
    """
    written = f"(?a:{_alternatives(parse(pattern))})"
    try:
        re.compile(written)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnknownSyntax(f"Python's re says: {error}") from error
    return written


def _alternatives(alternatives: Alternatives) -> str:
    return "|".join("".join(map(_node, sequence)) for sequence in alternatives.sequences)


def _node(node: Node) -> str:
    match node:
        case Literal(character):
            return _character(ord(character))
        case AnyCharacter():
            return "[^\\n\\r\\u2028\\u2029]"
        case CharacterClass(negated, items):
            return _class(negated, items)
        case Assertion(kind):
            return {"^": "^", "$": "\\Z", "b": "\\b", "B": "\\B"}[kind]
        case Backreference(name):
            if not name.isdecimal():
                raise UnknownSyntax("a backreference by name")
            return f"(?:\\{name})"
        case Group(opening, body):
            return f"({opening}{_alternatives(body)})"
        case Repeat(item, least, most, lazy):
            return f"{_node(item)}{{{least},{'' if most is None else most}}}{'?' if lazy else ''}"


def _class(negated: bool, items: tuple[Escape | tuple[int, int], ...]) -> str:
    if not items:
        return "[\\s\\S]" if negated else "(?!)"
    members = []
    for item in items:
        if isinstance(item, Escape):
            if item.name[0] in "pP":
                raise UnknownSyntax("Unicode properties are not in Python's re")
            members.append("\\" + item.name)
        else:
            low, high = map(_character, item)
            members.append(low if low == high else f"{low}-{high}")
    return f"[{'^' if negated else ''}{''.join(members)}]"


def _character(code: int) -> str:
    character = chr(code)
    if character in SYNTAX_CHARACTERS or character in "-&~":
        return "\\" + character
    return character if " " <= character <= "~" or code >= 0xA0 else f"\\x{code:02x}"
