"""Converts Python types to constraints, and the text of answers to values of those types."""

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec

from radixrt.lang.backends.protocol import Choices, Constraint, Grammar, JsonSchema, Regex
from radixrt.lang.errors import ProgramError


@dataclass(frozen=True)
class AnswerType:
    """The constraint of an answer, and the reader of its text."""

    constraint: Constraint | None
    read: Callable[[str], Any]
    """Raises ValueError (or msgspec's or pydantic's subclass) if the text is not of the type."""
    description: str = "text"
    is_whole: Callable[[str], bool] = lambda _: True
    """Whether an answer that max_tokens cut off is complete all the same."""
    python_type: Any = Any
    """Type of the value, if it is read from JSON."""


def answer_type(**given: Any) -> AnswerType:
    """The answer type of a gen.

    Args:
        given: ``regex``, ``schema``, ``choices``, ``grammar`` and ``type``; at most one of them is
            not None.

    Raises:
        ProgramError: several are given, or no schema can describe the type.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) > 1:
        raise ProgramError(
            f"gen takes one of {', '.join(given)}; leave all but one of {', '.join(asked)} out."
        )
    match asked:
        case {"regex": pattern}:
            wanted = "a text of its regular expression"
            return AnswerType(Regex(pattern), str, wanted, _matches(pattern))
        case {"grammar": text}:
            return AnswerType(Grammar(text), str, "a text of its grammar", lambda _: False)
        case {"choices": choices}:
            return _one_of({choice: choice for choice in choices}, "one of its choices")
        case {"schema": dict(schema)}:
            return AnswerType(JsonSchema(schema), msgspec.json.decode, "JSON", _is_whole_json)
        case {"schema": wanted} | {"type": wanted}:
            return of_python_type(wanted)
    return AnswerType(None, str)


def of_python_type(wanted: Any) -> AnswerType:
    """The answer type of a Python type.

    Raises:
        ProgramError: no schema can describe the type.

    >>> of_python_type(bool).constraint.schema
    {'type': 'boolean'}
    >>> of_python_type(Literal["small", "large"]).constraint
    Choices(texts=('small', 'large'))
    >>> of_python_type(list[int]).read("[1, 2]")
    [1, 2]
    """
    if wanted is str:
        return AnswerType(None, str)
    if (by_text := _texts_of(wanted)) is not None:
        return _one_of(by_text, _name_of(wanted))
    return AnswerType(
        JsonSchema(closed(schema_of(wanted)), _name_of(wanted)),
        lambda text: read_as(wanted, text),
        _name_of(wanted),
        _is_whole_json,
        wanted,
    )


def _one_of(by_text: dict[str, Any], description: str) -> AnswerType:
    """One of several texts, each for a value."""

    def read(text: str) -> Any:
        if text not in by_text:
            raise ValueError(f"it is none of {', '.join(by_text)}")
        return by_text[text]

    def is_whole(text: str) -> bool:
        return not any(other != text and other.startswith(text) for other in by_text)

    return AnswerType(Choices(tuple(by_text)), read, description, is_whole)


def _is_whole_json(text: str) -> bool:
    """For valid JSON: more could follow only a number."""
    return not text[-1:].isdigit()


def _matches(pattern: str) -> Callable[[str], bool]:
    """Whether a text matches a regular expression in full, by Python's dialect."""

    def is_whole(text: str) -> bool:
        try:
            return re.fullmatch(pattern, text) is not None
        except re.error:
            return False

    return is_whole


def schema_of(wanted: Any) -> dict[str, Any]:
    """The JSON schema of a type.

    Raises:
        ProgramError: the type has none.
    """
    try:
        if is_pydantic(wanted):
            return _adapter(wanted).json_schema()
        return msgspec.json.schema(wanted)
    except (TypeError, ValueError, RuntimeError) as error:  # pydantic's own are RuntimeErrors
        raise ProgramError(
            f"{_name_of(wanted)} can't be described by a JSON schema: {error}. Use a pydantic model, a dataclass, a "
            "msgspec.Struct, a TypedDict, or lists and dicts of plain types."
        ) from error


def read_as(wanted: Any, text: str) -> Any:
    """Raises ValueError if the text is not JSON of the type."""
    if is_pydantic(wanted):
        return _adapter(wanted).validate_json(text)
    return msgspec.json.decode(text, type=wanted)


def convert(wanted: Any, value: Any) -> Any:
    """A JSON value as a type.

    Raises:
        ValueError: the value is not of the type.
    """
    if is_pydantic(wanted):
        return _adapter(wanted).validate_python(value)
    return msgspec.convert(value, wanted)


def type_at(wanted: Any, pointer: str) -> Any:
    """The type of a part of a value; Any where the types do not name one.

    >>> type_at(dict[str, list[int]], "/a/0")
    <class 'int'>

    Args:
        wanted: the type of the whole value.
        pointer: JSON pointer of the part.
    """
    for step in pointer.split("/")[1:]:
        wanted = _inner_type(wanted, step.replace("~1", "/").replace("~0", "~"))
    return wanted


def _inner_type(wanted: Any, step: str) -> Any:
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin is typing.Annotated:
        return _inner_type(inner[0], step)
    if origin in (typing.Union, types.UnionType):
        found = [_inner_type(one, step) for one in inner if one is not type(None)]
        return found[0] if len(found) == 1 else Any
    if origin is tuple and inner[-1] is not Ellipsis:
        return inner[int(step)] if int(step) < len(inner) else Any
    if origin is not None:
        return (inner[-1] if origin is dict else inner[0]) if inner else Any
    return parameter_types(wanted).get(step, Any) if isinstance(wanted, type) else Any


def is_pydantic(wanted: Any) -> bool:
    """Whether a type, or a field of its dataclasses, contains a pydantic model."""
    return _holds_model(wanted, set())


def _holds_model(wanted: Any, met: set[type]) -> bool:
    """
    Args:
        met: dataclasses that are being searched; they may contain themselves.
    """
    if hasattr(wanted, "__pydantic_validator__"):
        return True
    inner = list(get_args(wanted))
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted) and wanted not in met:
        met.add(wanted)
        inner += parameter_types(wanted).values()
    return any(_holds_model(one, met) for one in inner)


def closed(schema: Any) -> Any:
    """A copy of a schema whose objects allow no further properties."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if result.get("type") == "object" and isinstance(schema.get("properties"), dict):
        result.setdefault("additionalProperties", False)
    return result


def _adapter(wanted: Any) -> Any:
    import pydantic  # here: only programs with pydantic models need it

    return pydantic.TypeAdapter(wanted)


def _texts_of(wanted: Any) -> dict[str, Any] | None:
    """The texts that stand for the values of a Literal or Enum."""
    if get_origin(wanted) is Literal:
        return _by_text((_plain(value), value) for value in get_args(wanted))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return _by_text((_plain(member.value), member) for member in wanted)
    return None


def _by_text(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ProgramError if two values have the same text."""
    by_text: dict[str, Any] = {}
    for text, value in pairs:
        if text in by_text:
            raise ProgramError(
                f"{by_text[text]!r} and {value!r} are both written {text!r}, so an answer could not tell them apart: "
                "leave one out."
            )
        by_text[text] = value
    return by_text


def _plain(value: Any) -> str:
    """The text of a value of a Literal or Enum."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, str | int):
        return str(value)
    raise ProgramError(
        f"The values of a Literal or Enum must be texts or whole numbers, not {value!r}: give others a name."
    )


def _name_of(wanted: Any) -> str:
    if isinstance(wanted, type) and not isinstance(wanted, types.GenericAlias):
        return wanted.__name__
    return str(wanted).replace("typing.", "")


def parameter_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's parameters, or of a dataclass's fields; Any if there is no
    annotation.

    Raises:
        ProgramError: an annotation names an unknown type.
    """
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ProgramError(
            f"The annotations of {function.__name__} can't be read: {error}. Import that type where the function is defined."
        ) from error
