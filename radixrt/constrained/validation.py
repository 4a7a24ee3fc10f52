"""Does a finished text satisfy its schema? The last word on an answer, by ``jsonschema``; nothing is ever fetched."""

import functools
import json
from typing import Any

import jsonschema
import referencing.jsonschema
from jsonschema.validators import validator_for

MAX_ERRORS = 8
MAX_ERROR_CHARS = 300


def errors_of(schema: str, text: str) -> list[str]:
    """Why a text is not valid under a schema (JSON text): a sentence each, at most MAX_ERRORS; empty if it is.

    Raises:
        referencing.exceptions.Unresolvable: the schema refers to something outside itself.
        re.error: a pattern is none.
    """
    try:
        value = json.loads(text, parse_constant=_not_json)
    except ValueError as error:
        return [f"The text is not JSON: {error}."]
    except RecursionError:
        return ["The text is nested too deeply to be looked at."]
    found = _validator(schema).iter_errors(value)
    return [_sentence(error) for error, _ in zip(found, range(MAX_ERRORS), strict=False)]


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    parsed = json.loads(schema)
    kind = validator_for(parsed, default=jsonschema.Draft202012Validator)
    return kind(
        parsed,
        format_checker=kind.FORMAT_CHECKER,
        registry=referencing.jsonschema.EMPTY_REGISTRY,
    )


def _sentence(error: jsonschema.ValidationError) -> str:
    where = "".join(f"/{step}" for step in error.absolute_path) or "the value"
    message = error.message
    if len(message) > MAX_ERROR_CHARS:
        message = message[:MAX_ERROR_CHARS] + "..."
    return f"At {where}, {error.validator}: {message}."


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
