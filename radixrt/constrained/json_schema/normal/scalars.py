"""Normalises a conjunction of schemas for numbers and for strings."""

import dataclasses
import math
from typing import Any

from radixrt.constrained.json_schema.keywords import (
    NOT_IN,
    NOT_INTEGER,
    distinct,
    is_integral,
    type_of,
    value_key,
)
from radixrt.constrained.json_schema.normal.flatten import Raw, count_bounds
from radixrt.constrained.json_schema.patterns import ANYTHING, anything_but, matches

MAX_DENIED = 200
"""Denied values of one string or number that are still turned into a pattern or into ranges."""

Form = dict[str, Any]
"""Keywords of one type, without subschemas; several forms are alternatives."""


def denied_values(simple: list[Raw], kind: str) -> list[Any]:
    """Values of one type that are ruled out, each once."""
    values = [value for raw in simple for value in raw.get(NOT_IN, ())]
    return distinct(value for value in values if type_of(value) == kind)


def number_forms(simple: list[Raw], integer: bool) -> list[Form]:
    """Disjoint alternatives for numbers; none where no number is left."""
    factors = {raw["multipleOf"] for raw in simple if "multipleOf" in raw}
    whole = [factor for factor in factors if is_integral(factor)]
    integer = integer or bool(whole)
    if integer and any(raw.get(NOT_INTEGER) for raw in simple):
        return []
    bounds = _Bounds()
    for raw in simple:
        bounds.add(raw)
    form: Form = {"type": "integer" if integer else "number"}
    multiples: list[float] = [math.lcm(*map(int, whole))] if whole else []
    # Decimal fractions are left as they are: their arithmetic is the validator's.
    multiples = [one for one in multiples if one > 1] + sorted(factors - set(whole))
    if multiples:
        form["multipleOf"] = multiples[0]
    if multiples[1:]:
        form["allOf"] = [{"type": "number", "multipleOf": each} for each in multiples[1:]]
    if any(raw.get(NOT_INTEGER) for raw in simple):
        form["not"] = {"type": "integer"}
    denied = sorted(denied_values(simple, "number"))
    if integer:
        denied = [value for value in denied if is_integral(value)]
        bounds.round()
    if len(denied) > MAX_DENIED:
        return [{**form, **bounds.words(), "not": {"enum": denied}}] if "not" not in form else []
    return [_single(form, part.words()) for part in bounds.split(denied, integer) if not part.empty]


def _single(form: Form, words: Form) -> Form:
    if words.get("minimum") is not None and words["minimum"] == words.get("maximum"):
        only = words["minimum"]
        if form == {"type": "number"} or form == {"type": "integer"}:
            return {"const": only}
    return {**form, **words}


@dataclasses.dataclass
class _Bounds:
    """A range of numbers. ``low`` and ``high`` are None where it is open-ended."""

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def add(self, raw: Raw) -> None:
        for word, is_open in (("minimum", False), ("exclusiveMinimum", True)):
            if word in raw and (
                self.low is None or (raw[word], is_open) > (self.low, self.low_open)
            ):
                self.low, self.low_open = raw[word], is_open
        for word, is_open in (("maximum", False), ("exclusiveMaximum", True)):
            if word in raw and (
                self.high is None or (-raw[word], is_open) > (-self.high, self.high_open)
            ):
                self.high, self.high_open = raw[word], is_open

    def round(self) -> None:
        """Keep the integers of the range."""
        if self.low is not None:
            self.low = math.floor(self.low) + 1 if self.low_open else math.ceil(self.low)
            self.low_open = False
        if self.high is not None:
            self.high = math.ceil(self.high) - 1 if self.high_open else math.floor(self.high)
            self.high_open = False

    @property
    def empty(self) -> bool:
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def split(self, denied: list[float], integer: bool) -> list["_Bounds"]:
        """The parts of the range between denied numbers, in ascending order."""
        parts, rest = [], self
        for value in denied:
            below, above = dataclasses.replace(rest), dataclasses.replace(rest)
            below.add({"exclusiveMaximum": value})
            above.add({"exclusiveMinimum": value})
            if integer:
                below.round()
                above.round()
            parts.append(below)
            rest = above
        return [*parts, rest]

    def words(self) -> Form:
        words: Form = {}
        if self.low is not None:
            words["exclusiveMinimum" if self.low_open else "minimum"] = self.low
        if self.high is not None:
            words["exclusiveMaximum" if self.high_open else "maximum"] = self.high
        return words


def string_forms(simple: list[Raw]) -> list[Form]:
    """One form, or none where no string is left."""
    shortest, longest = count_bounds(simple, "Length")
    patterns = list(dict.fromkeys(raw["pattern"] for raw in simple if "pattern" in raw))
    formats = list(dict.fromkeys(raw["format"] for raw in simple if "format" in raw))
    patterns = [pattern for pattern in patterns if pattern not in ANYTHING]
    denied = [
        text
        for text in denied_values(simple, "string")
        if len(text) >= shortest and (longest is None or len(text) <= longest)
        if not any(matches(pattern, text) is False for pattern in patterns)
    ]
    if "" in denied and shortest == 0:
        shortest = 1
        denied.remove("")
    if longest is not None and shortest > longest:
        return []
    if longest == 0:
        return _only_empty(patterns, formats)
    form: Form = {"type": "string"}
    if shortest:
        form["minLength"] = shortest
    if longest is not None:
        form["maxLength"] = longest
    if denied:
        total = sum(map(len, denied))
        if total > 10 * MAX_DENIED or any(not text.isprintable() for text in denied):
            form["not"] = {"enum": denied}
        else:
            patterns.append(anything_but(denied))
    if patterns:
        form["pattern"] = patterns[0]
    if formats:
        form["format"] = formats[0]
    more = [{"type": "string", "pattern": pattern} for pattern in patterns[1:]]
    more += [{"type": "string", "format": name} for name in formats[1:]]
    if more:
        form["allOf"] = more
    return [form]


def _only_empty(patterns: list[str], formats: list[str]) -> list[Form]:
    found = [matches(pattern, "") for pattern in patterns]
    if False in found:
        return []
    if None in found or formats:
        more = [{"type": "string", "pattern": pattern} for pattern in patterns]
        more += [{"type": "string", "format": name} for name in formats]
        return [{"type": "string", "maxLength": 0, "allOf": more}]
    return [{"const": ""}]


def literal_forms(simple: list[Raw], kind: str) -> list[Form]:
    """The remaining values of null or of the booleans."""
    values: list[Any] = [None] if kind == "null" else [False, True]
    denied = {value_key(value) for value in denied_values(simple, kind)}
    left = [value for value in values if value_key(value) not in denied]
    if len(left) == len(values):
        return [{"type": kind}]
    return [{"enum": left}] if left else []
