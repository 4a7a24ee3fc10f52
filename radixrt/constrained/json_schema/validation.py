"""Is this JSON text valid under a schema? By ``jsonschema``, with numbers as decimals, so that no rounding decides.

``multipleOf`` 0.01 of 0.07 is a question about decimals; in float64 the answer would be wrong.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from jsonschema import Draft202012Validator, TypeChecker, ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY as SPECIFICATIONS

from radixrt.constrained.json_schema.formats import DEFINED, LENGTHS, format_pattern

_MOST_DIGITS = 4000
"""Numbers of more digits stay decimals: as integers they would take much memory, and from 4,300 digits on Python does
not write them into a message."""


def _decimal(text: str) -> int | Decimal:
    try:
        number = Decimal(text)
    except ArithmeticError:
        raise ValueError(f"{text[:40]} is beyond all bounds") from None
    if not number:
        return 0
    is_whole = _is_whole(number)
    return int(number) if is_whole and number.adjusted() < _MOST_DIGITS else number


def _is_whole(number: Decimal) -> bool:
    """Without writing the number out, which may have a billion digits."""
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent >= 0 or (number.adjusted() >= 0 and number == number.to_integral_value())


def parse_exact(text: str) -> Any:
    """JSON with numbers as int, where they are whole, or Decimal.

    Raises:
        ValueError: it is not JSON; ``NaN`` and ``Infinity`` are not.
    """
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
    """Without writing the number out."""
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    numerator = int(Decimal((0, digits, 0))) * divisor.denominator
    if exponent >= 0:
        return numerator * pow(10, exponent, divisor.numerator) % divisor.numerator == 0
    if -exponent > numerator.bit_length():  # fewer factors of two than the power of ten
        return numerator == 0
    return numerator % (divisor.numerator * 10**-exponent) == 0


def first_repeated(items: list[Any]) -> int | None:
    """Index of the first item that equals one before it, as JSON schema has it: ``[1]`` and ``[true]`` differ."""
    seen = set()
    for index, item in enumerate(items):
        key = _key(item)
        if key in seen:
            return index
        seen.add(key)
    return None


def _key(value: Any) -> Any:
    """Equal for equal values."""
    if isinstance(value, list):
        return ("array", *map(_key, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, _key(item)) for name, item in value.items()))
    return isinstance(value, bool), value


def _unique_items(
    _validator: Any, unique: Any, value: Any, _schema: Any
) -> Iterator[ValidationError]:
    if unique and isinstance(value, list) and first_repeated(value) is not None:
        yield ValidationError(f"{value!r} has non-unique elements")


_Validator = extend(
    Draft202012Validator,
    validators={"multipleOf": _multiple_of, "uniqueItems": _unique_items},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": _is_number, "integer": _is_integer}
    ),
)

FORMATS = type(Draft202012Validator.FORMAT_CHECKER)(formats=())
"""Checkers of the formats that JSON schema defines: jsonschema's own where it has one, else the project's patterns."""


def _add_format(name: str) -> bool:
    known = Draft202012Validator.FORMAT_CHECKER.checkers.get(name)
    pattern = format_pattern(name)
    if known is not None:
        FORMATS.checkers[name] = known
    elif pattern is not None:
        matcher, most = re.compile(pattern), LENGTHS.get(name, 1 << 62)
        FORMATS.checks(name)(
            lambda text: (
                not isinstance(text, str) or (bool(matcher.search(text)) and len(text) <= most)
            )
        )
    return name in FORMATS.checkers


CHECKABLE_FORMATS = frozenset(name for name in sorted(DEFINED) if _add_format(name))
"""Formats that a check can look at; of the others, nothing knows what they allow."""


class SchemaValidator:
    """One schema, to hold many texts against."""

    def __init__(self, schema: Any) -> None:
        """``schema`` is valid 2020-12 and self-contained; remote references are never fetched."""
        self.validator = _Validator(
            parse_exact(json.dumps(schema)), format_checker=FORMATS, registry=SPECIFICATIONS
        )

    def first_error(self, text: str) -> ValidationError | None:
        """Why the text is not valid, or None if it is.

        Raises:
            ValueError: the text is not JSON.
        """
        return next(self.validator.iter_errors(parse_exact(text)), None)
