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

_MOST_DIGITS = 5000
"""Decimals of greater exponents stay decimals; as integers they would take too much memory."""


def _decimal(text: str) -> int | Decimal:
    number = Decimal(text)
    if not number:
        return 0
    exponent = number.as_tuple().exponent
    if (
        isinstance(exponent, int)
        and abs(exponent) < _MOST_DIGITS
        and number == number.to_integral()
    ):
        return int(number)
    return number


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
    return isinstance(value, int) or value == int(value)


def _multiple_of(
    _validator: Any, divisor: Any, value: Any, _schema: Any
) -> Iterator[ValidationError]:
    if not _is_number(_validator, value):
        return
    if abs(Decimal(value).adjusted()) > _MOST_DIGITS:
        yield ValidationError(f"whether {value} is a multiple of {divisor} takes too long to say")
    elif Fraction(value) % Fraction(divisor):
        yield ValidationError(f"{value} is not a multiple of {divisor}")


_Validator = extend(
    Draft202012Validator,
    validators={"multipleOf": _multiple_of},
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
