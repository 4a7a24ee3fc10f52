"""The kinds of constraint that a request can ask for, as they travel before compilation."""

from typing import Annotated, Literal

import msgspec


class _Constraint(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all kinds; the class name is the tag."""


class JsonSchema(_Constraint, frozen=True, kw_only=True):
    """JSON that is valid under a schema (draft 4 to 2020-12)."""

    schema: str
    """JSON text. The order of its keys is kept: properties are generated in this order."""
    strict: bool = True
    """Keywords that can't be enforced are an error; False: they are left out and reported."""
    any_order: bool = False
    """Objects take their properties in any order, not only in the schema's."""


class AnyJson(_Constraint, frozen=True, kw_only=True):
    """Any JSON."""

    object_only: bool = True
    """The whole is an object, as OpenAI's ``json_object`` means it."""


class Regex(_Constraint, frozen=True, kw_only=True):
    """Text that a regular expression matches from beginning to end."""

    pattern: str


class Choice(_Constraint, frozen=True, kw_only=True):
    """One of these texts."""

    options: tuple[str, ...]


class Ebnf(_Constraint, frozen=True, kw_only=True):
    """Text of a grammar in GBNF, the EBNF of llama.cpp and xgrammar; it begins with ``root``."""

    grammar: str


class Lark(_Constraint, frozen=True, kw_only=True):
    """Text of a context-free grammar in llguidance's dialect of Lark; it begins with ``start``."""

    grammar: str
    in_json_string: bool = False
    """The text is written between a JSON string's quotes, escaped. Only of a tag's content."""


class AnyText(_Constraint, frozen=True, kw_only=True):
    """Any text: the content of a structural tag that is not held to anything but its end."""

    excludes: tuple[str, ...] = ()
    """Texts that must not occur in it."""
    max_tokens: int | None = None
    """Most tokens. Only without ``excludes``, before the end or a control token."""


ParameterStyle = Literal[
    "qwen_xml", "seed_xml", "minimax_xml", "glm45", "glm47", "pythonic", "olmo3", "functiongemma", "gemma4",
]  # fmt: skip
"""How a tool-call format writes each parameter by itself."""


class Parameters(_Constraint, frozen=True, kw_only=True):
    """The arguments of a tool call, each written by itself: the content of a structural tag."""

    schema: JsonSchema
    """The schema of the arguments as one object."""
    style: ParameterStyle


class Tokens(_Constraint, frozen=True, kw_only=True):
    """One token, whatever its text."""

    tokens: tuple[int | str, ...]
    """Token ids, or texts of the vocabulary."""
    excluded: bool = False
    """It is none of these, and does not end the answer; False: it is one of them."""


class Series(_Constraint, frozen=True, kw_only=True):
    """Texts of these formats, one after the other."""

    elements: "tuple[Format, ...]"


class Either(_Constraint, frozen=True, kw_only=True):
    """A text of one of these formats."""

    elements: "tuple[Format, ...]"


class Repeated(_Constraint, frozen=True, kw_only=True):
    """Texts of one format, without anything between them."""

    content: "Format"
    least: int
    most: int | None


class Tag(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``begin``, then text that satisfies ``content``, then ``end``."""

    begin: str
    content: "Format | Parameters"
    end: str
    other_ends: tuple[str, ...] = ()
    """Other texts that may stand in place of ``end``."""
    tool: str = ""
    """The name of the tool that the tag calls, for errors."""


class StructuralTag(_Constraint, frozen=True, kw_only=True):
    """Text with tags in it, such as tool calls.

    Wherever free text writes one of the triggers, a tag that begins with it must follow.
    """

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...]
    """Each a prefix of the ``begin`` of at least one tag; each ``begin`` has exactly one."""
    free_text: bool = True
    """Text may stand around tags. False: only tags, with ``separator`` between them."""
    separator: str = ""
    min_tags: int = 0
    max_tags: int | None = None
    excludes: tuple[str, ...] = ()
    """Texts that must not occur in the free text."""
    lists: tuple[tuple[str, str], ...] = ()
    """If not empty: all tags stand together, with ``separator`` between them, behind one of these
    openings and before its closing; free text may precede them, and is the whole answer if there
    are no tags. The openings are the triggers. A tag without a ``begin`` stands alone, in place of
    the list."""
    not_text: str = ""
    """Only with ``lists``: they stand at the beginning of the answer alone, and free text must not
    begin as this regular expression says."""
    before: tuple[Tag, ...] = ()
    """Any number of these may come first. Only without ``free_text`` and ``lists``."""


Compound = Series | Either | Repeated | Tokens
"""Formats of other formats, and of tokens."""
Format = JsonSchema | AnyJson | Regex | Choice | Ebnf | Lark | AnyText | StructuralTag | Compound
"""What a part of an answer is held to."""

Constraint = Annotated[
    JsonSchema | AnyJson | Regex | Choice | Ebnf | Lark | StructuralTag | Compound,
    msgspec.Meta(description="The constraint of an answer."),
]


def is_endless(part: Format | Parameters) -> bool:
    """Whether a format goes on until something else ends it: free text."""
    match part:
        case AnyText():
            return True
        case StructuralTag():
            return part.free_text
        case Series():
            return is_endless(part.elements[-1])
        case Either():
            return any(map(is_endless, part.elements))
    return False
