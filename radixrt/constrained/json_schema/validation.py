"""Validates JSON text against a schema with ``jsonschema``, with numbers as decimals, so that no
rounding decides.

``multipleOf`` 0.01 of 0.07 is a question about decimals; in float64 the answer would be wrong. Only
``enum`` and ``const`` compare as float64: libraries write a number of the schema with as many
digits as it takes to read the same number.
"""

import json
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jsonschema import Draft202012Validator, TypeChecker, ValidationError
from jsonschema.validators import extend
from referencing import Registry

from radixrt.constrained.json_schema.values import first_repeated, value_key

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
