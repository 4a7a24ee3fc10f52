"""Objects with their properties in any order: random schemas and values, judged by jsonschema."""

import json
import os
import random
from typing import Any

import jsonschema
import pytest

from radixrt.base.errors import RequestError
from radixrt.constrained import requests
from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.any_order import MAX_PROPERTIES
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.errors import CannotCompile, CannotEnforce
from radixrt.constrained.json_schema.enforcement import enforce_json_schema
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from tests.constrained.vocabularies import facts_of

NUM_SCHEMAS = 10_000 if os.environ.get("RADIXRT_TORTURE") else 60
FACTS = facts_of("byte_level_json")
NAMES = ["id", "name", "value", "kind", "a b", 'q"', "é", "x/y", "a.b"]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object schema nine times of ten at the root; its values may be objects, lists, unions and
    the whole again."""
    kind = rng.random()
    if (depth and kind < 0.4) or depth > 2:
        scalars: list[dict[str, Any]] = [
            {"type": "integer", "minimum": 0, "maximum": 20},
            {"type": "string", "maxLength": 3},
            {"enum": ["red", 1, None]},
            {"type": "boolean"},
        ]
        return rng.choice(scalars)
    if depth and kind < 0.5:
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 3}  # fmt: skip
    if depth and kind < 0.6:
        return {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]}
    if depth and kind < 0.65:
        return {"$ref": "#/$defs/whole"}
    if depth and kind < 0.7:
        return {"oneOf": [random_schema(rng, depth + 1), {"type": "null"}]}
    names = rng.sample(NAMES, rng.randint(0, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [n for n in names if rng.random() < 0.4]
        + rng.sample(NAMES, rng.random() < 0.1),
    }
    schema["required"] = list(dict.fromkeys(schema["required"]))
    rest = rng.random()
    if rest < 0.5 and set(schema["required"]) <= set(names):
        schema["additionalProperties"] = False
    elif rest < 0.7:
        schema["additionalProperties"] = random_schema(rng, 3)
    if rng.random() < 0.1:
        schema["minProperties"] = rng.randint(1, 2)
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^z": {"type": "integer"}}
    return schema


def random_value(rng: random.Random, schema: Any, whole: Any, depth: int = 0) -> Any:
    """A value that comes close to a schema, its keys in any order; wrong at a place in some."""
    if rng.random() < 0.03:
        return rng.choice([None, 3, "z", {}, [], {"id": 1, "k": 2}])
    if schema == {"$ref": "#/$defs/whole"}:
        schema = whole
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return random_value(rng, rng.choice(schema[word]), whole, depth + 1)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "integer":
            return rng.randint(0, 21)
        case "string":
            return "".join(rng.choice("ab é") for _ in range(rng.randint(0, 3)))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            count = rng.randint(0, 3 if depth < 4 else 1)
            return [random_value(rng, schema["items"], whole, depth + 1) for _ in range(count)]
        case "null":
            return None
    likely = 0.6 if depth < 3 else 0.0
    names = [n for n in schema["properties"] if n in schema["required"] or rng.random() < likely]
    names += [n for n in schema["required"] if n not in schema["properties"]]
    if rng.random() < 0.2:
        names.append(rng.choice(["new", "zz", *NAMES]))
    if names and rng.random() < 0.05:
        names.pop()
    if depth > 6:
        names = []
    rng.shuffle(names)
    of = schema["properties"]
    rest = schema.get("additionalProperties") or {"type": "integer"}
    return {n: random_value(rng, of.get(n, rest), whole, depth + 1) for n in names}


def takes(matcher: Matcher, text: str) -> bool:
    tokens = [*FACTS.encode(text), FACTS.eos_token_ids[0]]
    return matcher.fork().advance(tokens) == len(tokens)


def test_random_values_of_random_schemas_are_judged_as_jsonschema_judges_them() -> None:
    valid = invalid = exact = 0
    for seed in range(NUM_SCHEMAS):
        rng = random.Random(seed)
        whole = random_schema(rng)
        schema = {**whole, "$defs": {"whole": whole}}
        try:
            enforced = enforce_json_schema(json.dumps(schema))
            grammar = llguidance.compile_in_any_order(enforced.schema, FACTS, "flexible")
        except (CannotEnforce, CannotCompile) as error:
            assert "atisfi" in str(error) or "finite" in str(error), (seed, error)
            continue
        matcher = load_grammar(grammar, FACTS)
        judge = jsonschema.Draft202012Validator(schema)
        exact += not enforced.checks
        for _ in range(25):
            value = random_value(rng, whole, whole)
            indent = rng.choice([None, 2])
            separators = (",", ": ") if indent else rng.choice([(",", ":"), (", ", ": ")])
            text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)
            is_valid, taken = judge.is_valid(value), takes(matcher, text)
            if is_valid:
                valid += 1
                assert taken or enforced.checks or _keeps_an_order(enforced.schema), (seed, text)
            else:
                invalid += 1
                assert not taken or enforced.checks, (seed, text)
    assert exact > NUM_SCHEMAS / 2 and valid > 5 * NUM_SCHEMAS and invalid > NUM_SCHEMAS


def _keeps_an_order(schema: Any) -> bool:
    """Whether the schema has keywords within which the order stays that of the schema."""
    text = json.dumps(schema)
    words = (
        "oneOf",
        "patternProperties",
        "allOf",
        "not",
        "minProperties",
        "maxProperties",
    )
    return any(f'"{word}"' in text for word in words)


def compiled(schema: dict[str, Any]) -> Matcher:
    constraint = requests.json_schema(schema, "schema")
    return load_grammar(compile_constraint(constraint, FACTS, CompileOptions()).grammar, FACTS)


def test_no_property_comes_twice_and_none_that_is_required_is_missing() -> None:
    numbers = {name: {"type": "integer"} for name in "abcdefgh"}
    schema = {
        "x-property-order": "any",
        "type": "object",
        "properties": numbers,
        "required": [*"aceg"],
    }
    closed = compiled({**schema, "additionalProperties": False})
    rng = random.Random(1)
    for _ in range(200):
        names = rng.sample("abcdefgh", rng.randint(3, 8))
        text = "{" + ",".join(f'"{name}":1' for name in names) + "}"
        assert takes(closed, text) == ({*"aceg"} <= {*names}), text
        assert not takes(closed, text[:-1] + f',"{names[0]}":1' + "}"), text
    assert not takes(closed, '{"a":1,"c":1,"e":1,"g":1,"z":1}')
    assert takes(compiled(schema), '{"z":1,"a":1,"c":1,"y":"b","e":1,"g":1,"z":2}')


def test_after_the_last_property_no_comma_comes() -> None:
    """A comma that nothing can follow would end the answer with an error."""
    schema = {"x-property-order": "any", "type": "object", "additionalProperties": False}
    matcher = compiled({**schema, "properties": {"a": {"type": "null"}, "b": {"type": "null"}}})
    ids = FACTS.encode('{"b":null,"a":null')
    assert matcher.advance(ids) == len(ids)
    assert not takes(matcher, ",") and matcher.fork().advance(FACTS.encode(",")) == 0


def test_an_object_with_more_properties_keeps_the_order_of_the_schema() -> None:
    def schema(count: int) -> dict[str, Any]:
        properties = {f"p{index}": {"type": "null"} for index in range(count)}
        return {"x-property-order": "any", "type": "object", "properties": properties}

    backwards = '{"p3":null,"p1":null}'
    assert takes(compiled(schema(MAX_PROPERTIES)), backwards)
    many = compiled(schema(MAX_PROPERTIES + 1))
    assert not takes(many, backwards) and takes(many, '{"p1":null,"p3":null}')


def test_a_union_of_objects_that_share_a_key_keeps_all_its_branches() -> None:
    branches = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": {"type": value}},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for kind, value in (("a", "integer"), ("b", "boolean"))
    ]
    union = {"type": "object", "properties": {"x": {"anyOf": branches}, "y": {"type": "null"}}}
    matcher = compiled({"x-property-order": "any", **union})
    assert takes(matcher, '{"y":null,"x":{"kind":"a","value":7}}')
    assert takes(matcher, '{"y":null,"x":{"kind":"b","value":true}}')
    assert not takes(matcher, '{"y":null,"x":{"kind":"b","value":7}}')
    assert takes(matcher, '{"y":null,"x":{"value":true,"kind":"b"}}')
    assert not takes(matcher, '{"y":null,"x":{"value":7,"kind":"b"}}')


def test_branches_that_begin_alike_are_told_apart_by_what_follows() -> None:
    """A name that one branch declares is additional in another; an object of one is any JSON in the
    other."""
    declared = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b"], "additionalProperties": False}  # fmt: skip
    opened = {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]}
    inner = {"type": "object", "properties": {"a": declared}, "required": ["a"], "additionalProperties": False}  # fmt: skip
    empty = {"type": "object", "additionalProperties": False}
    matcher = compiled({"x-property-order": "any", "anyOf": [declared, opened, inner, empty]})
    for text in ('{"b":null,"a":1}', '{"a":[{"x":"y"}],"b":2,"c":1}', '{"a":{"b":null,"a":2}}', '{"a":{"z":[]},"c":1}', "{}"):  # fmt: skip
        assert takes(matcher, text), text
    for text in ('{"a":1}', '{"a":{"z":1}}', '{"b":3,"a":1}', '{"c":1,"c":"x"}'):
        assert not takes(matcher, text), text


def test_the_order_is_any_only_where_it_is_asked_for() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}}
    backwards = '{"b":null,"a":null}'
    assert takes(compiled({**schema, "x-property-order": "any"}), backwards)
    assert not takes(compiled({**schema, "x-property-order": "schema"}), backwards)
    assert not takes(compiled(schema), backwards)
    with pytest.raises(RequestError, match='must be "any" or "schema"'):
        requests.json_schema({**schema, "x-property-order": "sorted"}, "schema")
