"""Takes the schema of a tool's arguments apart into its parameters, for formats that write each
parameter by itself.

Most such formats write a string without JSON's quotes, so constraint and parser must agree on which
parameters are strings: both ask :func:`declared_parameters`.
"""

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from radixrt.constrained.constraint import ParameterStyle

_ANNOTATIONS = {
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "$comment", "title",
    "description", "default", "examples", "deprecated", "x-property-order",
}  # fmt: skip
"""Keywords of an object whose parameters can be held one by one."""
_MAX_REFERENCES = 32


class Form(enum.Enum):
    """How a format without quotes writes a parameter's value."""

    TEXT = "text"
    """All values are strings: the string itself."""
    NULLABLE_TEXT = "nullable text"
    """All values are strings or null: the string itself, or ``null``."""
    JSON = "json"


@dataclasses.dataclass(frozen=True)
class Parameter:
    name: str
    schema: Any
    """Self-contained: it has the definitions of the whole."""
    is_required: bool
    form: Form


@dataclasses.dataclass(frozen=True)
class Style:
    """How a format writes a parameter."""

    opening: tuple[str, str]
    """The texts before and behind the parameter's name."""
    closing: str
    """The text behind a value."""
    separator: str
    quote: str
    """The text before and behind a string."""
    stop: str
    """Lark expression of what no string may hold: a parser would take it for the end."""
    words: Mapping[bool | None, str]
    """The values that are written as words, as far as they stand outside of lists and objects."""
    names: str
    """Regular expression of the names of parameters."""
    takes_json: bool = False
    """Strings may be JSON, too."""


_QWEN = Style(
    opening=("<parameter=", ">\n"),
    closing="\n</parameter>\n",
    separator="",
    quote="",
    stop='"</parameter>"',
    words={},
    names="[^<>\\n]+",
)
_SEED = dataclasses.replace(_QWEN, opening=("<parameter=", ">"), closing="</parameter>\n")
_GLM45 = dataclasses.replace(
    _QWEN,
    opening=("<arg_key>", "</arg_key>\n<arg_value>"),
    closing="</arg_value>\n",
    stop='"</arg_value>"',
)
_PYTHONIC = Style(
    opening=("", "="),
    closing="",
    separator=", ",
    quote="'",
    stop=r"/['\\\x00-\x1f]/",
    takes_json=True,
    words={True: "True", False: "False", None: "None"},
    names="[A-Za-z_][A-Za-z0-9_]*",
)
STYLES: dict[ParameterStyle, Style] = {
    "qwen_xml": _QWEN,
    "seed_xml": _SEED,
    "minimax_xml": dataclasses.replace(
        _SEED, opening=('<parameter name="', '">'), names='[^<>"\\n]+'
    ),
    "glm45": _GLM45,
    "glm47": dataclasses.replace(
        _GLM45, opening=("<arg_key>", "</arg_key><arg_value>"), closing="</arg_value>"
    ),
    "pythonic": _PYTHONIC,
    "olmo3": dataclasses.replace(_PYTHONIC, words={}),
    "functiongemma": Style(
        opening=("", ":"),
        closing="",
        separator=",",
        quote="<escape>",
        stop='"<escape>"',
        words={None: "null"},
        names="[A-Za-z_][A-Za-z0-9_.-]*",
    ),
    "gemma4": Style(
        opening=("", ":"),
        closing="",
        separator=",",
        quote='<|"|>',
        stop=r'"<|\"|>"',
        words={None: "null"},
        names="[A-Za-z_][A-Za-z0-9_.-]*",
    ),
}


def declared_parameters(schema: Any) -> list[Parameter]:
    """The parameters of a tool, in its schema's order; required ones not declared come last."""
    if not isinstance(schema, dict):
        return []
    properties, required = schema.get("properties"), schema.get("required")
    declared = dict(properties) if isinstance(properties, dict) else {}
    needed = [one for one in required if isinstance(one, str)] if isinstance(required, list) else []
    for name in needed:
        declared.setdefault(name, schema.get("additionalProperties", True))
    return [_parameter(name, one, schema, name in needed) for name, one in declared.items()]


def any_parameter(schema: Any) -> Parameter:
    """A parameter that the tool does not declare."""
    root = schema if isinstance(schema, dict) else {}
    return _parameter("", root.get("additionalProperties", True), root, False)


def takes_any_name(schema: dict[str, Any]) -> bool:
    """Whether a tool declares no parameter and takes whatever comes."""
    return schema.get("additionalProperties", True) is not False and not declared_parameters(schema)


def keywords_on_the_whole(schema: dict[str, Any]) -> Iterable[str]:
    """The keywords of the arguments' schema that concern several parameters, such as ``oneOf``."""
    return (word for word in schema if word not in _ANNOTATIONS)


def _parameter(name: str, schema: Any, root: dict[str, Any], is_required: bool) -> Parameter:
    definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
    whole = {**schema, **definitions} if isinstance(schema, dict) else schema
    return Parameter(name, whole, is_required, _form(schema, root))


def _form(schema: Any, root: dict[str, Any], depth: int = 0) -> Form:
    """The form of all values of a schema."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return Form.JSON
    if "$ref" in schema:
        return _form(_target(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return _form_of({type(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return _form_of(set(map(type, schema["enum"])))
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return _form_of({_TYPES.get(str(kind), object) for kind in kinds})
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list) and branches:
            found: set[type] = set()
            for branch in branches:
                is_null = isinstance(branch, dict) and branch.get("type") == "null"
                found |= {type(None)} if is_null else _KINDS[_form(branch, root, depth + 1)]
            return _form_of(found)
    return Form.JSON


_TYPES: dict[str, type] = {"string": str, "null": type(None)}
_KINDS: dict[Form, set[type]] = {
    Form.TEXT: {str},
    Form.NULLABLE_TEXT: {str, type(None)},
    Form.JSON: {object},
}


def _form_of(kinds: set[type]) -> Form:
    if kinds == {str}:
        return Form.TEXT
    return Form.NULLABLE_TEXT if kinds == {str, type(None)} else Form.JSON


def _target(reference: Any, root: dict[str, Any]) -> Any:
    """The schema that a reference to a definition names; None: it is of another kind."""
    match str(reference).split("/"):
        case ["#", ("$defs" | "definitions") as word, name] if isinstance(root.get(word), dict):
            return root[word].get(name)
    return None
