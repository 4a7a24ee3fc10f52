"""Validates a value against its schema, and finds the parts of the value that cause each error.

Runs in the helper processes of the compile pool, where a slow or hostile schema does no harm.
"""

import functools
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import jsonschema.exceptions

from radixrt.constrained.grammar import Path, SpanError
from radixrt.constrained.json_schema.validation import SchemaValidator, parse_exact
from radixrt.constrained.json_schema.values import first_repeated

_MAX_SEARCHED_PARTS = 32
"""Most parts of a container that is searched for a cause: each part costs a validation."""
_MAX_SEARCHED_CHARACTERS = 16_384
_MAX_ERRORS = 4
_MAX_MESSAGE = 300


def validate_text(schema: str, text: str) -> list[SpanError]:
    """All that is wrong with the JSON value ``text``: empty if it is valid under ``schema``, JSON
    text of 2020-12.

    At most four errors, those nearest to the root last. A value that can't be read or validated,
    such as one with a number beyond all bounds, counts as not valid.

    Raises:
        jsonschema.SchemaError: the schema itself is wrong. re.error: a pattern in it is none of
        Python's. referencing.exceptions.Unresolvable: it refers to something outside itself, which
        is never fetched.
    """
    validator = _validator(schema)
    try:
        value = parse_exact(text)
    except (ValueError, RecursionError) as error:
        # JSON, but more than this interpreter reads: integers of thousands of digits, great depth.
        return [SpanError((), "", f"The value can't be read: {error}")]
    try:
        errors = [_deepest(error) for error in validator.iter_errors(value)]
    except (RecursionError, ArithmeticError, ValueError) as error:
        return [SpanError((), "", f"The value can't be validated: {error}")]
    errors.sort(key=lambda error: -len(error.absolute_path))
    is_short = len(text) <= _MAX_SEARCHED_CHARACTERS
    return [
        SpanError(
            tuple(error.absolute_path),
            str(error.validator or ""),
            error.message[:_MAX_MESSAGE],
            *(_causes(validator, value, error) if is_short else ()),
        )
        for error in errors[:_MAX_ERRORS]
    ]


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """The validator of a schema, kept by the schema's text."""
    decoded = json.loads(schema)
    jsonschema.Draft202012Validator.check_schema(decoded)
    return SchemaValidator(decoded).validator


def _deepest(error: jsonschema.ValidationError) -> jsonschema.ValidationError:
    """Below an anyOf or oneOf without a matching branch: the error of the closest branch."""
    return jsonschema.exceptions.best_match([error]) or error


# ---------------------------------------------------------------- the parts that cause an error


def _causes(
    validator: Any, value: Any, error: jsonschema.ValidationError
) -> tuple[tuple[Path, ...], ...]:
    """The unsuited and the superfluous parts of the invalid container, found by replacing or
    leaving out each in turn."""
    container, path = error.instance, tuple(error.absolute_path)
    if error.validator == "uniqueItems" and isinstance(container, list):
        return (((*path, first_repeated(container)),),)
    if not isinstance(container, list | dict) or len(container) > _MAX_SEARCHED_PARTS:
        return ()
    kind = tuple(error.absolute_schema_path)

    def is_right_now() -> bool:
        try:
            return all(
                tuple(_deepest(other).absolute_schema_path) != kind
                for other in validator.iter_errors(value)
            )
        except (RecursionError, ArithmeticError, ValueError):
            return False

    steps: list[Any] = list(container) if isinstance(container, dict) else [*range(len(container))]
    return tuple(
        tuple((*path, step) for step in steps if helps(container, step, is_right_now))
        for helps in (_helps_to_change, _helps_to_drop)
    )


def _helps_to_drop(container: Any, step: Any, is_right_now: Callable[[], bool]) -> bool:
    whole = container.copy()
    del container[step]
    try:
        return is_right_now()
    finally:
        container.clear()
        container.update(whole) if isinstance(container, dict) else container.extend(whole)


def _helps_to_change(container: Any, step: Any, is_right_now: Callable[[], bool]) -> bool:
    """Whether another scalar in place of this one makes the error vanish."""
    before = container[step]
    try:
        for other in _others(before):
            container[step] = other
            if is_right_now():
                return True
        return False
    finally:
        container[step] = before


def _others(scalar: Any) -> tuple[Any, ...]:
    """A few scalars that differ from it in parity, size, beginning and end."""
    match scalar:
        case bool():
            return (not scalar,)
        case int() | float():
            return (scalar + 1, -scalar, 10 * scalar + 3, scalar + 1_000_003, 0.5)
        case Decimal():
            return (scalar + 1, -scalar, 10 * scalar + 3, scalar + 1_000_003, Decimal("0.5"))
        case str():
            return ("", f"{scalar}~", f"~{scalar}", scalar[:1])
        case None:
            return (0, "")
    return ()
