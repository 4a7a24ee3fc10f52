"""Normalised schemas accept what the originals accept, in forms that need no check beside a
grammar."""

import itertools
import json
from typing import Any

import jsonschema
import pytest

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.enforced import CONSTRAINING
from radixrt.constrained.json_schema.enforcement import enforce_normal_form
from radixrt.constrained.json_schema.keywords import ORIGIN, without_origins
from radixrt.constrained.json_schema.normal import document
from radixrt.constrained.json_schema.normal.normalize import normalize

VALUES: list[Any] = [
    None, True, False, 0, 1, 2, 3, 5, 10, -1, 0.5, 1.5, "", "a", "b", "ab", "abc", "c", "x-1",
    *[list(items) for count in range(4) for items in itertools.product([1, 2, "a"], repeat=count)],
    *[
        dict(zip(names, values, strict=True))
        for count in range(4)
        for names in itertools.combinations(["a", "b", "c", "kind"], count)
        for values in itertools.product([1, "x", "y"], repeat=count)
    ],
]  # fmt: skip

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft7": "http://json-schema.org/draft-07/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
CLOSED = {"properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": False}

NO_CHECK_LEFT = {
    "oneOf of types": {"oneOf": [{"type": "string"}, {"type": "null"}]},
    "oneOf with a discriminator": {
        "type": "object",
        "oneOf": [
            {"properties": {"kind": {"const": "x"}, "a": {"type": "string"}}, "required": ["kind"]},
            {"properties": {"kind": {"const": "y"}, "b": {"type": "string"}}, "required": ["kind"]},
        ],
    },
    "oneOf of ranges": {"oneOf": [{"type": "number", "maximum": 1}, {"type": "number", "exclusiveMinimum": 1}]},
    "oneOf of required names": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf required against closed": {
        "type": "object",
        "oneOf": [{"required": ["kind"]}, CLOSED],
    },
    "overlapping oneOf": {"oneOf": [{"type": "integer", "maximum": 2}, {"type": "integer", "minimum": 1}]},
    "not a type": {"not": {"type": ["string", "object"]}},
    "not some strings": {"type": "string", "not": {"enum": ["a", "ab", ""]}},
    "not some integers": {"type": "integer", "not": {"enum": [0, 2]}},
    "not required": {"type": "object", "not": {"required": ["a", "b"]}},
    "not anyOf": {"not": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["a"]}, {"type": "number", "maximum": 2}]}},
    "not not": {"not": {"not": {"type": "array", "minItems": 2}}},
    "if then else": {
        "type": "object",
        "if": {"properties": {"kind": {"const": "x"}}},
        "then": {"required": ["a"]},
        "else": {"required": ["b"]},
    },
    "dependencies": {"type": "object", "dependencies": {"a": ["b"], "c": {"minProperties": 1, **CLOSED}}},
    "names of an enum": {"type": "object", "propertyNames": {"enum": ["a", "kind"]}},
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "at least one": {"type": "object", **CLOSED, "minProperties": 1},
    "at most one": {"type": "object", **CLOSED, "maxProperties": 1},
    "enum beside bounds": {"enum": [1, 5, "a", "abc", None], "minimum": 2, "maxLength": 2},
    "allOf of objects": {
        "allOf": [
            {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
            {"properties": {"a": {"enum": [1, "x"]}, "b": {}}, "required": ["b"]},
        ]
    },
    "multiples": {"type": "integer", "allOf": [{"multipleOf": 2}, {"multipleOf": 5}]},
    "unevaluatedProperties": {
        "$ref": "#/$defs/base",
        "properties": {"b": {}},
        "unevaluatedProperties": False,
        "$defs": {"base": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    },
    "contains in few items": {"type": "array", "items": {"enum": [1, 2, "a"]}, "maxItems": 3, "contains": {"type": "string"}},
    "contains anything": {"type": "array", "items": {"enum": [1, 2, "a"]}, "contains": True, "maxContains": 2},
    "contains anything, in few items": {"type": "array", "items": {"enum": [1, 2, "a"]}, "maxItems": 1, "contains": True, "maxContains": 2},
    "contains in a prefix": {"type": "array", "prefixItems": [{"type": "string"}, {}], "items": {"type": "integer"}, "contains": {"const": "a"}},
    "contains twice": {"type": "array", "maxItems": 2, "allOf": [{"contains": {"const": 1}}, {"contains": {"type": "string"}}]},
    "not the empty array": {"type": "array", "not": {"enum": [[], "a"]}},
    "oneOf with a common branch": {
        "oneOf": [
            {"anyOf": [{"type": ["string", "null"]}, {"type": "object", **CLOSED, "required": ["a"]}]},
            {"type": "object", **CLOSED, "required": ["a"]},
        ]
    },
    "undeclared required": {"type": "object", "required": ["a"], "patternProperties": {"^a": {"const": "x"}}},
}  # fmt: skip


def objects_in(schema: Any) -> list[dict[str, Any]]:
    """All subschemas of a normalised schema that are objects."""
    if isinstance(schema, list):
        return [found for item in schema for found in objects_in(item)]
    if not isinstance(schema, dict):
        return []
    found = [schema]
    for word, value in schema.items():
        if word in ("properties", "patternProperties", "$defs"):
            found += [inner for item in value.values() for inner in objects_in(item)]
        elif word not in ("enum", "const"):
            found += objects_in(value)
    return found


@pytest.mark.parametrize("name", NO_CHECK_LEFT)
def test_a_rewritten_schema_is_equivalent_and_leaves_nothing_to_check(name: str) -> None:
    schema = NO_CHECK_LEFT[name]
    normalised = normalize(schema)
    reference = (
        jsonschema.Draft7Validator if "dependencies" in schema else jsonschema.Draft202012Validator
    )
    original, result = (
        reference(schema),
        jsonschema.Draft202012Validator(without_origins(normalised)),
    )
    expected_results = [original.is_valid(value) for value in VALUES]
    assert True in expected_results and False in expected_results
    assert [result.is_valid(value) for value in VALUES] == expected_results
    enforced = enforce_normal_form(normalised)
    assert (enforced.checks, enforced.unenforced) == ((), ())


ITEMS = {"type": "array", "items": {"type": "integer"}}
UNIQUE = {"type": "array", "uniqueItems": True, "maxItems": 9}


@pytest.mark.parametrize(
    "schema",
    [
        {**ITEMS, "contains": {"type": "string"}},
        {**ITEMS, "prefixItems": [{"type": "string"}], "contains": {"type": "string"}, "minContains": 2},
        {**ITEMS, "maxItems": 2, "contains": {"minimum": 1}, "minContains": 3},
        {"type": "array", "maxItems": 0, "not": {"enum": [[]]}},
        {"oneOf": [UNIQUE, UNIQUE]},
        {**UNIQUE, "not": {"anyOf": [{"type": "object", "minProperties": 1}, UNIQUE, {"type": "array", "uniqueItems": True}]}},
        {"type": "integer", "not": {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "number"}]}},
        {"const": [1], "oneOf": [{"const": False}, {"type": "object", "format": "ipv4"}]},
    ],
)  # fmt: skip
def test_a_schema_without_a_value_is_refused_before_it_runs(schema: Any) -> None:
    assert not any(jsonschema.Draft202012Validator(schema).is_valid(value) for value in VALUES)
    with pytest.raises(CannotEnforce, match="No value satisfies it"):
        normalize(schema)


@pytest.mark.parametrize(
    ("schema", "draft", "valid", "invalid"),
    [
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, "draft4", [2, 1.5], [1]),
        ({"items": [{"type": "string"}], "additionalItems": False}, "draft7", [[], ["a"]], [[1], ["a", 1]]),
        ({"items": [{"type": "string"}], "additionalItems": False}, None, [[], ["a"]], [[1], ["a", 1]]),
        ({"minimum": 1, "exclusiveMinimum": True}, None, [2], [1]),
        ({"definitions": {"s": {"type": "string"}}, "$ref": "#/definitions/s", "maxLength": 1}, "draft7", ["ab"], [1]),
        ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 1}, "draft2019-09", ["a"], ["ab", 1]),
        ({"const": 1}, "draft4", [1, 2], []),
        ({"dependencies": {"a": ["b"]}}, "draft2020-12", [{"a": 1}], []),
        ({"dependencies": {"a": ["b"]}}, None, [{"a": 1, "b": 1}], [{"a": 1}]),
        ({"$id": "http://x/y", "$defs": {"s": {"$id": "z", "type": "null"}}, "$ref": "z"}, "draft2020-12", [None], [1]),
        ({"$defs": {"s": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, "draft2020-12", [None], [1]),
        ({"$defs": {"a/b~%": {"type": "null"}}, "$ref": "#/$defs/a~1b~0%25"}, None, [None], [1]),
        (
            {"type": "object", "properties": {"next": {"$recursiveRef": "#"}}, "required": ["v"]},
            "draft2019-09", [{"v": 1}, {"v": 1, "next": {"v": 2}}], [{}, {"v": 1, "next": {}}],
        ),
    ],
)  # fmt: skip
def test_each_draft_is_read_in_its_own_words(
    schema: Any, draft: str | None, valid: list[Any], invalid: list[Any]
) -> None:
    if draft is not None:
        schema = {"$schema": DRAFTS[draft], **schema}
    result = jsonschema.Draft202012Validator(without_origins(normalize(schema)))
    assert all(result.is_valid(value) for value in valid)
    assert not any(result.is_valid(value) for value in invalid)


def test_true_is_not_one_and_one_is_one_point_zero() -> None:
    result = normalize({"enum": [1, True, "1"], "type": ["integer", "string"]})
    assert without_origins(result) == {"enum": [1, "1"]}
    result = normalize({"allOf": [{"enum": [1, 2]}, {"enum": [1.0, True]}]})
    assert without_origins(result) in ({"const": 1}, {"const": 1.0})


def test_every_subschema_says_where_it_stems_from() -> None:
    schema = {"properties": {"a/b": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}}
    result = normalize(schema)
    assert all(isinstance(part.get(ORIGIN), str) for part in objects_in(result))
    branches = next(part for part in objects_in(result) if part[ORIGIN] == "/properties/a~1b")[
        "anyOf"
    ]
    assert [part[ORIGIN] for part in branches] == [
        "/properties/a~1b/anyOf/0",
        "/properties/a~1b/anyOf/1",
    ]


def test_properties_keep_the_order_of_the_schema() -> None:
    schema = {
        "allOf": [{"properties": {"z": {}, "b": {"type": "null"}}}],
        "properties": {"a": {}, "b": {}},
        "required": ["late"],
        "type": "object",
    }
    assert list(normalize(schema)["properties"]) == ["z", "b", "a", "late"]


@pytest.mark.parametrize(
    ("schema", "keyword", "pointer"),
    [
        ({"items": {"$ref": "http://example.com/a"}}, "$ref", "/items/$ref"),
        ({"$ref": "#/$defs/none"}, "$ref", "/$ref"),
        ({"$ref": "#"}, "$ref", ""),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"}, "$ref", "/$defs/a"),
        ({"properties": {"a": {"x-guidance": {}}}}, "x-guidance", "/properties/a/x-guidance"),
        ({"properties": {"a": {"type": "text"}}}, "type", "/properties/a/type"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "minLength": -1}, "minLength", "/minLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "schema", ""),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "schema", ""),
        ([], "schema", ""),
    ],
)  # fmt: skip
def test_an_error_names_keyword_and_place(schema: Any, keyword: str, pointer: str) -> None:
    with pytest.raises(CannotEnforce) as raised:
        normalize(schema)
    assert (raised.value.keyword, raised.value.pointer) == (keyword, pointer)


def test_recursive_schemas_stay_references() -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"allOf": [{"$ref": "#"}, {"required": ["v"]}]}, "v": {"type": "integer"}},
    }  # fmt: skip
    result = jsonschema.Draft202012Validator(without_origins(normalize(schema)))
    assert result.is_valid({"next": {"v": 1, "next": {"v": 2}}})
    assert not result.is_valid({"next": {"v": 1, "next": {}}})


def test_exponential_schemas_stay_small() -> None:
    doubled: dict[str, Any] = {"l0": {"type": "integer"}}
    for level in range(1, 60):
        reference = {"$ref": f"#/$defs/l{level - 1}"}
        doubled[f"l{level}"] = {"type": "object", "properties": {"a": reference, "b": reference}}
    result = normalize({"$ref": "#/$defs/l59", "$defs": doubled})
    assert len(json.dumps(result)) < 60_000
    choices = [
        {"anyOf": [{"required": [f"a{i}"]}, {"properties": {f"b{i}": {"type": "null"}}}]}
        for i in range(30)
    ]
    schema = {"type": "object", "allOf": choices}
    result = normalize(schema)
    assert len(json.dumps(result)) < 200_000
    for value in ({}, {"b3": 1}, {"b3": 1, "a3": 1}, {"b29": None}, {"b29": 0, "a28": 1}):
        expected = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert jsonschema.Draft202012Validator(without_origins(result)).is_valid(value) == expected


def test_deep_and_huge_schemas_end_in_an_error_or_a_schema() -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(CannotEnforce, match="deep"):
        normalize(deep)
    names = [f"name {index}" for index in range(100_000)]
    assert len(normalize({"type": "string", "enum": names})["enum"]) == len(names)
    chain = {f"l{i}": {"properties": {"a": {"$ref": f"#/$defs/l{i + 1}"}}} for i in range(600)}
    assert normalize({"$ref": "#/$defs/l0", "$defs": {**chain, "l600": {"type": "null"}}})


@pytest.mark.parametrize("draft", sorted(document._VALIDATORS))
def test_the_fast_meta_validator_agrees_with_jsonschema(draft: str) -> None:
    values: list[Any] = [
        1,
        -1,
        1.0,
        1.5,
        2**70,
        True,
        None,
        "",
        "string",
        "#/a",
        [],
        [{}],
        {},
        {"a": 1},
    ]
    values += [{"a": {}}, {"a": ["b", "b"]}, ["string", "string"], {"type": 1}, [1, 1.0], [True, 1]]
    slow = document._VALIDATORS[draft](document._VALIDATORS[draft].META_SCHEMA)
    words = {
        word for kinds in (CONSTRAINING, slow.META_SCHEMA.get("properties", {})) for word in kinds
    }
    expected_results = set()
    for word in sorted(words | {"$id", "$anchor", "$defs", "dependencies", "$dynamicRef", "id"}):
        for value in values:
            schema = {"properties": {"a": {word: value}}}
            expected = slow.is_valid(schema)
            assert document._is_valid(schema, draft) == expected, schema
            expected_results.add(expected)
    assert expected_results == {True, False}
