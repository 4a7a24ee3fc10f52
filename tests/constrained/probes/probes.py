"""Small schemas that show the treatment of a use of keywords by a library, made by rule where
possible.

A probe is a schema with the texts to try; whether a text is valid is never written here, an
independent validator says it. Only where validators differ (formats, regular expressions) a probe
says what is valid.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from radixrt.constrained.json_schema.enforced import uses_in


@dataclass(frozen=True)
class Probe:
    """One schema, whose treatment says something about one use."""

    use: str
    schema: Any
    texts: tuple[str, ...]
    known: dict[str, bool] = field(default_factory=dict)
    """Texts whose validity is stated, not computed."""
    may_be_unwritable: frozenset[str] = frozenset()


STRINGS = (
    '""', '"a"', '"b"', '"ab"', '"ba"', '"abc"', '"abcd"', '"aab"', '"abab"', '"é"', '"éé"', '"😀"', '"😀😀"', '"😀😀😀"',
    '"a\\nb"', '"\\n"', '"\\"\\""', '"\\\\"', '"/"', '"\x7f"', '"a\x01"', '"\x01\x01"', '"\n\n"', '"a\tb"',
    '123e4567-e89b-12d3-a456-426614174000"', '"123e4567-e89b-12d3-a456-42661417400"', '"x', '"a""', "'a'",
)  # fmt: skip
NUMBERS = (
    "0", "-0", "0.0", "-0.0", "1", "1.0", "1.00", "01", "+1", "1.", ".5", "1e0", "10e-1", "2", "3", "4", "5", "6", "7", "10", "12", "15",
    "100", "1e2", "1E+2", "-1", "-2", "-3", "-5", "-10", "-100", "0.5", "5e-1", "0.50", "1.5", "2.5", "2.75", "3.5", "4.5", "5.5", "-0.5", "-1.5", "-2.5",
    "0.01", "0.1", "0.11", "0.3", "0.33", "0.07", "0.001", "0.015", "0.0001", "1e-7", "99", "101", "1e3", "1000", "-1000",
    "123456789012345678901234567890", "-123456789012345678901234567890", "1e30", "-1e30", "1" + "0" * 30, "-1" + "0" * 30, "1e400", "-1e400", "0.0000001", "1" + "0" * 400, "-1" + "0" * 400, "--1", "1e", "NaN", "Infinity",
)  # fmt: skip
ARRAYS = (
    "[]", "[ ]", "[1]", "[1,1]", "[1, 1.0]", "[1,2]", "[1,2,3]", "[1,2,3,4]", "[1,2,3,4,5]", '["a"]', '["a",1]', '["a",1,2]', '["a","b"]',
    '["a","b","c"]', '[1,"a"]', '[1,2,"a"]', '["a",1,"b"]', '["a",1,2,3]', '["a",true]', '["a",true,1]', '[true]', "[null]", "[[]]", "[{}]",
    "[1,]", "[,1]", "[1", '["a",1.5]', '["a","b",true,null]',
)  # fmt: skip
OBJECTS = (
    "{}", "{ }", '{"a":1}', '{"a": 1}', '{"a":"x"}', '{"b":"x"}', '{"b":1}', '{"a":1,"b":"x"}', '{"b":"x","a":1}', '{"a":1,"b":1}', '{"a":"x","b":1}',
    '{"c":1}', '{"c":"x"}', '{"c":true}', '{"a":1,"c":1}', '{"c":1,"a":1}', '{"a":1,"c":true}', '{"c":true,"a":1}', '{"a":1,"b":"x","c":1}',
    '{"a":1,"b":"x","c":true}', '{"c":1,"d":1}', '{"c":1,"c":1}', '{"c":1,"c":2}', '{"c":true,"d":1}', '{"a":1,"a":1}', '{"a":1,"a":"x"}', '{"a":"x","a":1}',
    '{"\\u0061":1}', '{"\\u0061":"x"}', '{"a":1,"\\u0061":"x"}', '{"\\u0063":true}', '{"x-c":1}', '{"x-c":"s"}', '{"x-c":1,"x-d":1}', '{"x-c":1,"x-c":1}', '{"a":1,"x-c":1}', '{"a":1,"x-c":"s"}', '{"x-c":"s","a":1}',
    '{"x\\u002dc":"s"}', '{"a":1,"b":"x","x-c":1}', '{"a":1,"b":"x","c":1,"d":1}', '{"a":1,"c":1,"d":1}', '{"c":1,"d":1,"e":1}', '{"":1}', '{"aa":1}', '{"aa":"x"}', '{"a\\n":"x"}',
    '{"a":1,}', '{a:1}', '{"a":null}', '{"z":1}', '{"z":1,"a":1}', '{"a":1,"z":1}', '{"a":1,"b":"x","z":1}', '{"z":1,"a":1,"b":"x"}', '{"z":1,"c":1}', '{"z":1,"x-c":1}', '{"b":"x","z":1}', '{"c":1,"z":1}',
)  # fmt: skip
OTHERS = ("null", "true", "false", "nul", "")
TEXTS = {
    "string": STRINGS,
    "integer": NUMBERS,
    "number": NUMBERS,
    "array": ARRAYS,
    "object": OBJECTS,
}
ALL_TEXTS = (
    '"a"',
    '"b"',
    '"abc"',
    "1",
    "2",
    "3",
    "5",
    "1.5",
    "-1",
    "[]",
    "[1]",
    "[1,2]",
    '["a"]',
    *OBJECTS[:20],
    *OTHERS,
)
SAMPLES = ('"a"', "1", "1.5", "[]", "{}", *OTHERS)

VALUES: dict[str, dict[str, tuple[Any, ...]]] = {
    "string": {"minLength": (1, 2), "maxLength": (2, 3), "pattern": ("^a", "b$", "^(?:ab)+$"), "format": ("uuid",)},
    "number": {
        "minimum": (1, -2), "maximum": (5, 100), "exclusiveMinimum": (1, -3), "exclusiveMaximum": (5, 101), "multipleOf": (1, 2, 5),
    },
    "array": {
        "prefixItems": ([{"type": "string"}], [{"type": "string"}, {"type": "integer"}]),
        "items": ({"type": "integer"}, False), "minItems": (1, 2), "maxItems": (2, 3),
    },
    "object": {
        "properties": ({"a": {"type": "integer"}, "b": {"type": "string"}},),
        "required": (["a"], ["b"], ["z"]),
        "additionalProperties": (False, {"type": "integer"}),
        "patternProperties": ({"^x-": {"type": "integer"}}, {"^a": {"type": "integer"}}),
        "minProperties": (1, 2), "maxProperties": (1, 2),
    },
}  # fmt: skip
VALUES["integer"] = VALUES["number"]
ALONE: dict[str, dict[str, tuple[Any, ...]]] = {
    "array": {
        "contains": ({"type": "integer"},), "minContains": (2,), "maxContains": (1,), "uniqueItems": (True,), "unevaluatedItems": (False,),
    },
    "object": {
        "propertyNames": ({"pattern": "^a"}, {"maxLength": 1}, False, {"enum": ["a", "c"]}), "dependentRequired": ({"a": ["b"]},),
        "dependentSchemas": ({"a": {"required": ["b"]}},), "unevaluatedProperties": (False,),
    },
}  # fmt: skip
"""Keywords tried with one other at a time."""


def by_rule() -> Iterator[Probe]:
    """Those that rules make, in a fixed order."""
    for type_name in VALUES:
        yield from _combinations(type_name)
        yield from _pairs(type_name)


def named(prefix: str, schema: Any) -> str:
    """The name of the use that starts so."""
    return next(use.name for use in uses_in(schema) if use.name.startswith(prefix))


def _combinations(type_name: str) -> Iterator[Probe]:
    """All sets of keywords that act together, in two or three choices of values each."""
    texts = (*TEXTS[type_name], *SAMPLES)
    values = VALUES[type_name]
    for size in range(len(values) + 1):
        for keywords in itertools.combinations(values, size):
            choices = itertools.product(*(values[keyword] for keyword in keywords))
            for choice in choices:
                schema = {"type": type_name, **dict(zip(keywords, choice, strict=True))}
                if _sensible(schema):
                    yield Probe(named(f"{type_name}/", schema), schema, texts)


def _sensible(schema: dict[str, Any]) -> bool:
    """False where no value could be valid, which some libraries refuse."""
    low = max(schema.get("minimum", -1000), schema.get("exclusiveMinimum", -1000) + 1)
    high = min(schema.get("maximum", 1000), schema.get("exclusiveMaximum", 1001) - 1)
    if low + 5 > high and schema.get("multipleOf", 1) == 5:
        return False
    for least, most in (
        ("minLength", "maxLength"),
        ("minItems", "maxItems"),
        ("minProperties", "maxProperties"),
    ):
        if schema.get(least, 0) > schema.get(most, 1000):
            return False
    if schema.get("items") is False and schema.get("minItems", 0) > len(
        schema.get("prefixItems", ())
    ):
        return False
    return low <= high and not ("format" in schema and len(schema) > 2)


def _pairs(type_name: str) -> Iterator[Probe]:
    texts = (*TEXTS[type_name], *SAMPLES)
    for keyword, values in ALONE.get(type_name, {}).items():
        beside = (
            {"contains": {"type": "integer"}} if keyword in ("minContains", "maxContains") else {}
        )
        for value in values:
            schema = {"type": type_name, **beside, keyword: value}
            yield Probe(named(f"{type_name}/", schema), schema, texts)
            for other, other_values in VALUES[type_name].items():
                both = {**schema, other: other_values[0]}
                yield Probe(named(f"{type_name}/", both), both, texts)


def texts_of(values: list[Any]) -> tuple[str, ...]:
    """Compact and spaced spellings of values."""
    return tuple(
        dict.fromkeys(
            text
            for value in values
            for text in (
                json.dumps(value, ensure_ascii=False),
                json.dumps(value, ensure_ascii=False, separators=(",", ":")),
            )
        )
    )
