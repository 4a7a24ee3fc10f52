"""Validates JSON text against a schema with ``jsonschema``, with numbers as decimals, so that no
rounding decides, and finds the parts of the value that cause each error.

``multipleOf`` 0.01 of 0.07 is a question about decimals; in float64 the answer would be wrong. Only
``enum`` and ``const`` compare as float64: libraries write a number of the schema with as many
digits as it takes to read the same number.
"""

import functools
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import jsonschema.exceptions
from jsonschema import Draft202012Validator, TypeChecker, ValidationError
from jsonschema.validators import extend
from referencing import Registry

from radixrt.constrained.grammar import Path, SpanError
from radixrt.constrained.json_schema.keywords import first_repeated, value_key

_MAX_DIGITS = 4000
"""Numbers of more digits stay decimals: as integers they would take much memory, and from 4,300
digits on Python does not write them into a message."""


def _decimal(text: str) -> int | Decimal:
    try:
        number = Decimal(text)
    except ArithmeticError:
        raise ValueError(f"{text[:40]} is beyond all bounds") from None
    if not number:
        return 0
    is_whole = _is_whole(number)
    return int(number) if is_whole and number.adjusted() < _MAX_DIGITS else number


def _is_whole(number: Decimal) -> bool:
    """Whether a number is whole. It is not written out, since it may have a billion digits."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent >= 0 or (number.adjusted() >= 0 and number == number.to_integral_value())


def parse_exact(text: str) -> Any:
    """JSON with numbers as int, where they are whole, or Decimal. Raises ValueError if it is not
    JSON; ``NaN`` and ``Infinity`` are not."""
    return json.loads(text, parse_float=_decimal, parse_constant=_no_json)


def _no_json(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_number(_checker: TypeChecker, value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_integer(_checker: TypeChecker, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    return (
        value.is_integer()
        if isinstance(value, float)
        else isinstance(value, int) or _is_whole(value)
    )


def _multiple_of(
    _validator: Any, divisor: Any, value: Any, _schema: Any
) -> Iterator[ValidationError]:
    if _is_number(_validator, value) and not _is_multiple(Decimal(value), Fraction(divisor)):
        yield ValidationError(f"{value} is not a multiple of {divisor}")


def _is_multiple(value: Decimal, divisor: Fraction) -> bool:
    """Whether a number is a multiple of another. It is not written out."""
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    numerator = int(Decimal((0, digits, 0))) * divisor.denominator
    if exponent >= 0:
        return numerator * pow(10, exponent, divisor.numerator) % divisor.numerator == 0
    if -exponent > numerator.bit_length():  # fewer factors of two than the power of ten
        return numerator == 0
    return numerator % (divisor.numerator * 10**-exponent) == 0


def _as_read(value: Any) -> Any:
    """A value with numbers as a reader of JSON has them, in float64, unless they are integers."""
    if isinstance(value, list):
        return [_as_read(item) for item in value]
    if isinstance(value, dict):
        return {name: _as_read(item) for name, item in value.items()}
    return float(value) if isinstance(value, Decimal) else value


def _enum(_validator: Any, allowed: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    key = value_key(_as_read(value))
    if not any(key == value_key(_as_read(each)) for each in allowed):
        yield ValidationError(f"{value!r} is not one of {allowed!r}")


def _const(_validator: Any, only: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if value_key(_as_read(value)) != value_key(_as_read(only)):
        yield ValidationError(f"{only!r} was expected")


def _unique_items(
    _validator: Any, unique: Any, value: Any, _schema: Any
) -> Iterator[ValidationError]:
    if unique and isinstance(value, list) and first_repeated(value) is not None:
        yield ValidationError(f"{value!r} has non-unique elements")


_Validator = extend(
    Draft202012Validator,
    validators={
        "multipleOf": _multiple_of,
        "uniqueItems": _unique_items,
        "enum": _enum,
        "const": _const,
    },
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": _is_number, "integer": _is_integer}
    ),
)


class SchemaValidator:
    """One schema, to hold many texts against."""

    def __init__(self, schema: Any) -> None:
        """``schema`` is valid 2020-12 and self-contained; remote references are never fetched."""
        self.validator = _Validator(
            parse_exact(json.dumps(schema)),
            format_checker=Draft202012Validator.FORMAT_CHECKER,
            registry=Registry(),
        )

    def first_error(self, text: str) -> ValidationError | None:
        """Why the text is not valid; None if it is. Raises ValueError if it is not JSON."""
        return next(self.validator.iter_errors(parse_exact(text)), None)


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
