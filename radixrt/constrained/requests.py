"""Reads constraints from the values that users give, for the server and for ``LLM``.

Only the form is checked here; the compiler decides whether a constraint can be enforced.
"""

import json
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, get_args

from radixrt.base.convert import check_depth
from radixrt.base.errors import RequestError, wrong
from radixrt.base.sampling_params import SamplingParams
from radixrt.constrained.constraint import (
    AnyJson,
    Choice,
    Constraint,
    Ebnf,
    JsonSchema,
    Lark,
    Regex,
)

MAX_SCHEMA_DEPTH = 256
"""Lists and objects within one another; the deepest of 5,747 schemas of real software has 63."""
MAX_SOURCE_CHARS = 4 << 20
"""Longest schema, pattern, grammar or list of choices."""
MAX_EBNF_CHARS = 256 << 10
"""Longest EBNF grammar; compiling one takes more than linear time and memory."""
MAX_JSON_MARKS = 100_000
"""Brackets, commas and colons in the text of a schema, its strings too: a bound on its values."""
PROPERTY_ORDER = "x-property-order"
"""Keyword at the root of a schema: ``any`` or ``schema``, the default."""
_NO_TYPES = (int, float, bytes, list, tuple, types.FunctionType, types.MethodType)
_EBNF_RULE = re.compile(r"^[^\S\n]*+[\w.-]++\s*+::=", re.MULTILINE)
"""The pattern does not backtrack: a text of empty lines takes no longer than others."""


def json_schema(schema: Any, param: str, strict: bool = True) -> JsonSchema:
    """The constraint of a schema. Raises RequestError if it is no JSON schema.

    Args:
        schema: a dict, a bool, JSON text, or a Python type: a pydantic model, a dataclass, a
            ``TypedDict``, an ``Enum``, ``list[int]``, ...
        param: name of the field, for errors.
        strict: False allows keywords that cannot be enforced.
    """
    if isinstance(schema, str):
        schema = parse_json(schema, param)
    elif not isinstance(schema, dict | bool):
        schema = _schema_of_type(schema, param)
    if not isinstance(schema, dict | bool):
        raise wrong(
            param, f"must be a JSON schema: an object or a boolean, not {_json_type(schema)}"
        )
    text = json_text(schema, param)
    order = schema.get(PROPERTY_ORDER) if isinstance(schema, dict) else None
    any_order = order is not None and takes_any_order(order, f"{param}.{PROPERTY_ORDER}")
    return JsonSchema(schema=text, strict=strict, any_order=any_order)


def takes_any_order(order: Any, param: str) -> bool:
    """Whether objects take their properties in any order. Raises RequestError if the value is
    neither ``any`` nor ``schema``."""
    if order not in ("any", "schema"):
        raise wrong(param, 'must be "any" or "schema"')
    return bool(order == "any")


def any_json(object_only: bool = True) -> AnyJson:
    return AnyJson(object_only=object_only)


def regex(pattern: Any, param: str) -> Regex:
    """Raises RequestError if it is no text, or an empty one."""
    return Regex(pattern=_text(pattern, param))


def choice(options: Any, param: str) -> Choice:
    """Raises RequestError if it is no list of texts, or an empty one."""
    if isinstance(options, str | bytes) or not isinstance(options, Sequence):
        raise wrong(param, "must be a list of strings to choose from")
    if sum(len(option) for option in options if isinstance(option, str)) > MAX_SOURCE_CHARS:
        raise _too_long(param)
    if not options:
        raise wrong(param, "is an empty list; give at least one string")
    for index, option in enumerate(options):
        where = f"{param}[{index}]"
        if not isinstance(option, str):
            raise wrong(where, f"must be a string, not {_json_type(option)}")
        _check_unicode(option, where)
    return Choice(options=tuple(dict.fromkeys(options)))


def grammar(text: Any, param: str) -> Ebnf | Lark:
    """EBNF if a line of it begins with ``name ::=``, else Lark. Raises RequestError if it is no
    text, or an empty one, or too long."""
    text = _text(text, param)
    return ebnf(text, param) if _EBNF_RULE.search(text) else Lark(grammar=text)


def ebnf(text: Any, param: str) -> Ebnf:
    """Raises RequestError if it is no text, or an empty one, or too long."""
    return Ebnf(grammar=_text(text, param, MAX_EBNF_CHARS))


def only_one(asked: Sequence[tuple[str, Constraint]]) -> Constraint | None:
    """The constraint of a request.

    Args:
        asked: the constraint of each field, with the field's name.

    Raises:
        RequestError: there are several.
    """
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise RequestError(
            f"{names} exclude each other: an answer is held to one constraint. Leave all but one out.",
            param=asked[1][0],
        )
    return asked[0][1]


class ConstraintKeywords(TypedDict, total=False):
    """How a Python program asks for a constraint: one of these, and ``strict`` with a schema."""

    schema: Any
    """A schema as :func:`json_schema` takes it."""
    regex: str
    choices: Sequence[str]
    grammar: str
    """EBNF or Lark, as :func:`grammar` tells them apart."""
    structured: Constraint
    """A constraint of any kind."""
    strict: bool


def from_keywords(keywords: ConstraintKeywords) -> Constraint | None:
    """Raises RequestError if there are several constraints, or one is not well formed."""
    unknown = sorted(keywords.keys() - ConstraintKeywords.__annotations__.keys())
    if unknown:
        raise RequestError(
            f"There is no keyword {', '.join(unknown)}; an answer can be held to a schema, a regex, choices, a "
            "grammar, or a constraint given as structured."
        )
    readers: dict[str, Callable[[Any, str], Constraint]] = {
        "regex": regex, "choices": choice, "grammar": grammar, "structured": _constraint,
    }  # fmt: skip
    asked: list[tuple[str, Constraint]] = []
    if (schema := keywords.get("schema")) is not None:
        asked.append(("schema", json_schema(schema, "schema", keywords.get("strict", True))))
    elif "strict" in keywords:
        raise wrong("strict", "goes with a schema")
    for name, read in readers.items():
        if (value := keywords.get(name)) is not None:
            asked.append((name, read(value, name)))
    return only_one(asked)


def check_sampling(constraint: Constraint | None, sampling: SamplingParams) -> None:
    """Raises RequestError if the sampling settings and the constraint exclude each other."""
    if constraint is not None and sampling.ignore_eos:
        raise wrong(
            "ignore_eos",
            "and structured output exclude each other: a constrained answer ends where its grammar "
            "does. Leave ignore_eos out",
        )


def parse_json(text: str, param: str) -> Any:
    """Raises RequestError if it is not JSON (NaN is not), or is nested too deeply, or too long."""
    if len(text) > MAX_SOURCE_CHARS:
        raise _too_long(param)
    if sum(map(text.count, "[{,:")) > MAX_JSON_MARKS:
        raise wrong(
            param, f"has more than {MAX_JSON_MARKS} brackets, commas and colons; simplify it"
        )

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise wrong(param, f"is not valid JSON: {error}") from error
    except RecursionError as error:
        raise wrong(param, "is nested too deeply") from error


def json_text(value: Any, param: str) -> str:
    """The JSON text of a value; its keys keep their order. Raises RequestError if it is no JSON, or
    is nested too deeply."""
    check_depth(value, param, MAX_SCHEMA_DEPTH)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise wrong(param, f"can't be written as JSON: {error}") from error
    if len(text) > MAX_SOURCE_CHARS:
        raise _too_long(param)
    _check_unicode(text, param)
    return text


def _schema_of_type(python_type: Any, param: str) -> Any:
    import pydantic  # here, since only Python programs give types

    if python_type is None or isinstance(python_type, _NO_TYPES):
        raise wrong(
            param, f"must be a JSON schema: an object or a boolean, not {_json_type(python_type)}"
        )
    try:
        return pydantic.TypeAdapter(python_type).json_schema()
    except pydantic.errors.PydanticUserError as error:
        reason = str(error).partition("\n")[0]
        raise RequestError(
            f"{param} must be a JSON schema, or a type that pydantic can describe: {reason}",
            param=param,
        ) from error


def _constraint(value: Any, param: str) -> Constraint:
    if not isinstance(value, get_args(get_args(Constraint)[0])):
        raise wrong(
            param,
            "must be one of radixrt.constrained.constraint's constraints, such as Regex(pattern=...)",
        )
    constraint: Constraint = value
    return constraint


def _text(value: Any, param: str, most: int = MAX_SOURCE_CHARS) -> str:
    if not isinstance(value, str):
        raise wrong(param, f"must be a string, not {_json_type(value)}")
    if not value:
        raise wrong(param, "is empty; give it a value or leave it out")
    if len(value) > most:
        raise _too_long(param, most)
    _check_unicode(value, param)
    return value


def _too_long(param: str, most: int = MAX_SOURCE_CHARS) -> RequestError:
    return wrong(param, f"is longer than {most} characters; shorten it")


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(
            param, "holds a lone surrogate (half of a UTF-16 pair), which is not a character"
        ) from error


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "a list", tuple: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)
