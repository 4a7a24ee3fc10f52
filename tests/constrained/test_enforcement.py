"""Grammar and checks together enforce a whole schema, or the schema is refused."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from bench.structured import values_at
from radixrt.constrained.backends.llguidance import schema_error
from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema import enforced, enforcement, position
from radixrt.constrained.json_schema.enforced import is_enforced
from radixrt.constrained.json_schema.enforcement import (
    EnforcedSchema,
    enforce_json_schema,
    enforce_normal_form,
)
from radixrt.constrained.json_schema.validation import SchemaValidator
from tests.constrained.probes.measure import compile_schema
from tests.suite import examples

LINKED = {
    "$ref": "#/$defs/item",
    "$defs": {
        "item": {
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
                "next": {"$ref": "#/$defs/item"},
            },
        }
    },
}


def enforce(schema: Any, **options: Any) -> EnforcedSchema:
    return enforce_json_schema(json.dumps(schema), **options)


def is_allowed(made: EnforcedSchema, text: str) -> bool:
    """By the grammar, and by the checks on what it lets through."""
    accepts = compile_schema(made.schema)
    assert accepts is not None
    if not accepts(text.encode()):
        return False
    value = json.loads(text)
    return all(
        SchemaValidator(check.schema).first_error(json.dumps(part)) is None
        for check in made.checks
        for part in values_at(value, check.path)
    )


def test_the_last_schema_compiled_is_the_one_of_the_result() -> None:
    """So that its grammar can be kept: here after keywords were dropped."""
    tried: list[str] = []

    def compile_text(text: str) -> tuple[str, str | None]:
        tried.append(text)
        return f"grammar of {text}", schema_error(text)

    for schema in ({"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, {"const": "a"}, LINKED):
        made = enforce(schema, compile_text=compile_text)
        assert made.grammar == f"grammar of {json.dumps(made.schema, ensure_ascii=False)}"
        assert made.grammar.endswith(tried[-1])


def test_the_subschema_that_is_worked_on_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notes are read at the time limit, of which the compile pool has its own test."""
    notes: list[str] = []

    def noting(text: str) -> str | None:
        notes.append(position.advice(file))
        return schema_error(text)

    with position.shared() as file:
        position.share(file.fileno())
        monkeypatch.setattr(enforcement, "schema_error", noting)
        overlapping = {"oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]}
        enforce(
            {"properties": {"a": {"items": overlapping}}},
            compile_text=lambda text: (None, noting(text)),
        )
    assert any("grammar is too large" in note for note in notes)
    assert any("'/properties/a/items'" in note and "was searched" in note for note in notes)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("\\W", "é"), ("^\\D$", "٣"), ("\\S", "\x85"), ("\\s", "\ufeff"), ("[^\\d]", "٣"), ("[^\\w]", "é")],
)  # fmt: skip
@pytest.mark.parametrize(
    "others", [{}, {"additionalProperties": {"type": "string"}}, {"maxProperties": 3}]
)
def test_names_of_which_engines_differ_whether_they_match_are_checked(
    pattern: str, name: str, others: dict[str, Any]
) -> None:
    """What a grammar takes for another name may have any value that others may have."""
    made = enforce({"type": "object", "patternProperties": {pattern: {"type": "integer"}}} | others)
    assert not is_allowed(made, json.dumps({name: "x"}, ensure_ascii=False))
    assert is_allowed(made, json.dumps({name: 1}, ensure_ascii=False))


def test_a_plain_schema_needs_no_check() -> None:
    made = enforce({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]})  # fmt: skip
    assert (made.checks, made.unenforced) == ((), ())
    assert is_allowed(made, '{"a": 3}') and not is_allowed(made, '{"a": 2}')


def test_a_check_stands_on_the_smallest_value_that_every_answer_has_there() -> None:
    schema = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "number"}}, "b": {"type": "string"}},
        },
    }  # fmt: skip
    [check] = enforce(schema).checks
    assert check.path == (None, "a")
    assert check.keywords == ("uniqueItems",)
    assert check.pointer == "/items/properties/a"


def test_a_keyword_in_a_recursive_definition_is_checked_on_the_whole() -> None:
    made = enforce(LINKED)
    assert [check.path for check in made.checks] == [()]
    assert is_allowed(made, '{"tags": ["a"], "next": {"tags": ["b", "c"]}}')
    assert not is_allowed(made, '{"tags": ["a"], "next": {"tags": ["b", "b"]}}')


def test_a_keyword_below_a_dropped_one_of_is_not_lost() -> None:
    unique = {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}
    schema = {
        "oneOf": [
            {"oneOf": [unique, {"type": "array", "maxItems": 1}]},
            {"type": "array", "minItems": 9},
        ]
    }
    made = enforce(schema)
    oracle = Draft202012Validator(schema)
    for value in ([], [1], [1, 1], [1, 2], ["a", "a"], [1] * 9, list(range(9))):
        assert is_allowed(made, json.dumps(value)) <= oracle.is_valid(value), value


def without_uses(monkeypatch: pytest.MonkeyPatch, *uses: str) -> None:
    """Let the library look as if it did not enforce some uses of keywords."""
    monkeypatch.setattr(
        enforced, "is_enforced", lambda name: is_enforced(name) and name not in uses
    )
    enforced._unenforced_of_scalars.cache_clear()


def test_a_reference_that_the_grammar_does_not_follow_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_uses(monkeypatch, "any/$ref")
    links = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    made = enforce(links)
    assert is_allowed(made, '{"next": {"next": {}}}')
    assert not is_allowed(made, '{"next": {"next": 1}}') and not is_allowed(made, "1")


def test_what_can_not_be_left_out_below_a_dropped_one_of_is_refused_by_its_pointer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_uses(monkeypatch, "any/oneOf", "any/false")
    branches = [
        {"type": "object", "properties": {"a": False, "b": {"type": "string"}}},
        {"type": "object", "properties": {"c": {"type": "integer"}}, "minProperties": 1},
    ]
    with pytest.raises(CannotEnforce) as caught:
        enforce({"oneOf": branches})
    assert "any/false" in caught.value.reason


def test_values_with_control_characters_are_left_out_and_need_no_check() -> None:
    """llguidance does not write them; a schema that allows nothing else is refused."""
    properties = {"a": {"enum": ["\x01", ",", ";"]}, "b": {"type": "string", "pattern": "a.*b"}}
    schema = {"type": "object", "properties": properties, "required": ["a"]}
    made = enforce(schema, allow_checks=False)
    assert made.checks == ()
    assert is_allowed(made, '{"a": ","}')
    assert not is_allowed(made, '{"a": 1}') and not is_allowed(made, '{"a": "\\u0002"}')
    with pytest.raises(CannotEnforce) as caught:
        enforce({"enum": ["\x01"]})
    assert caught.value.keyword == "const" and "control characters" in caught.value.reason


def test_without_checks_the_error_names_keyword_and_pointer() -> None:
    with pytest.raises(CannotEnforce) as caught:
        enforce(LINKED, allow_checks=False)
    assert caught.value.keyword == "uniqueItems"
    assert caught.value.pointer == "/$defs/item/properties/tags/uniqueItems"
    assert "only a validator could hold an answer to it" in caught.value.reason


def test_best_effort_lists_what_is_left_out() -> None:
    made = enforce(LINKED, allow_checks=False, strict=False)
    assert made.checks == ()
    assert [(u.keyword, u.pointer) for u in made.unenforced] == [
        ("uniqueItems", "/$defs/item/properties/tags/uniqueItems")
    ]
    assert SchemaValidator(made.validator).first_error('{"tags": ["a", "a"]}') is not None


@pytest.mark.parametrize("number", [2**63, 2**64 + 1, 12345678901234567890, -(2**63) - 1])
@pytest.mark.parametrize("as_part", [False, True])
def test_integers_beyond_64_bits_are_not_rounded(number: int, as_part: bool) -> None:
    value = [number] if as_part else number
    made = enforce({"const": value})
    rounded = json.dumps([float(number)] if as_part else float(number))
    assert not is_allowed(made, rounded)


@pytest.mark.parametrize("schema", [{"const": "\ud800"}, {"required": ["\udc00"]}])
def test_half_a_surrogate_pair_is_refused(schema: Any) -> None:
    with pytest.raises(CannotEnforce, match="surrogate"):
        enforce(schema)


def test_what_no_validator_reads_says_nothing_of_an_answer() -> None:
    made = enforce({"type": "string", "pattern": "^\\p{Lu}$"})
    assert SchemaValidator(made.validator).first_error('"A"') is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://example.com/schema.json"},
        {"type": "integer", "minimum": 5, "maximum": 2},
        {"type": "no such type"},
        {"type": "string", "pattern": "("},
        {"$ref": "#/$defs/missing"},
        False,
    ],
)
def test_what_can_not_be_a_constraint_is_refused(schema: Any) -> None:
    with pytest.raises(CannotEnforce):
        enforce(schema)


def test_a_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(CannotEnforce, match="no JSON"):
        enforce_json_schema('{"type": ')


def test_a_definition_that_nothing_satisfies_does_not_spoil_the_rest() -> None:
    made = enforce_normal_form(
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/nothing"}, "c": {"type": "integer"}},
            "$defs": {"nothing": {"const": None, "allOf": [{"type": "object"}]}},
        }
    )
    assert is_allowed(made, '{"c": 1}')
    assert not is_allowed(made, '{"a": null}') and not is_allowed(made, '{"a": {}}')


def test_formats_that_json_schema_does_not_define_are_annotations() -> None:
    made = enforce({"type": "string", "format": "color"})
    assert made.checks == () and is_allowed(made, '"x"')


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date-time", "2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z"),
        ("hostname", "a.example", "a" * 64),
        ("json-pointer", "/a~0b", "/a~b"),
        ("uri-reference", "../a?b#c", "a b"),
        ("regex", "a+", "("),
        ("regex", "(?:a)[b]", "(?P<n>a)"),
    ],
)
def test_formats_that_json_schema_defines_are_asserted(name: str, valid: str, invalid: str) -> None:
    for schema in ({"type": "string", "format": name}, {"type": "string", "format": name, "minLength": 1}):  # fmt: skip
        made = enforce(schema)
        assert is_allowed(made, json.dumps(valid))
        assert not is_allowed(made, json.dumps(invalid))
        assert made.checks or SchemaValidator(made.validator).first_error(json.dumps(invalid))


def test_options_of_a_library_inside_a_schema_are_refused() -> None:
    with pytest.raises(CannotEnforce) as caught:
        enforce({"items": {"type": "string", "x-guidance": {"lenient": True}}})
    assert (caught.value.keyword, caught.value.pointer) == ("x-guidance", "/items/x-guidance")


def test_the_digits_of_other_scripts_are_no_digits() -> None:
    made = enforce({"type": "string", "pattern": "^\\d$"})
    assert is_allowed(made, '"3"') and not is_allowed(made, '"٣"')


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a\0b", "x"]},
        {"enum": [["a\0b"], "x"]},
        {"type": "string", "pattern": "^(?:a\\x00b|x)$"},
        {"type": "string", "pattern": "^a\\x01b$|x"},
    ],
)
def test_control_characters_are_not_left_out_of_values(schema: Any) -> None:
    made = enforce(schema)
    assert is_allowed(made, '"x"')
    assert not is_allowed(made, '"ab"') and not is_allowed(made, '["ab"]')


# ---------------------------------------------------------------- any schema, any value

NAMES = st.sampled_from(["a", "b", "x-1"])
SCALARS = st.sampled_from([None, True, 0, 1, 2, 1.5, -3, "", "a", "ab", "b"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5)  # fmt: skip
SMALL = st.integers(0, 3)
LEAVES = st.one_of(
    st.fixed_dictionaries({"type": st.just("string")}, optional={"minLength": SMALL, "maxLength": st.integers(1, 3), "pattern": st.sampled_from(["^a", "b$", "^(?!a)"])}),
    st.fixed_dictionaries({"type": st.sampled_from(["integer", "number"])}, optional={"minimum": st.integers(-3, 1), "maximum": st.integers(1, 3), "multipleOf": st.sampled_from([1, 2, 0.5])}),
    st.fixed_dictionaries({"enum": st.lists(SCALARS, min_size=1, max_size=3, unique_by=repr)}),
    st.sampled_from([True, {}, {"type": "null"}, {"type": ["string", "null"]}, {"const": 1}, {"minLength": 1, "minimum": 1}]),
)  # fmt: skip


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=2), "required": st.lists(NAMES, max_size=2, unique=True),
            "additionalProperties": inner | st.just(False), "patternProperties": st.dictionaries(st.sampled_from(["^x", "a"]), inner, max_size=1),
            "minProperties": SMALL, "maxProperties": st.integers(1, 3), "propertyNames": st.just({"maxLength": 2}),
            "dependentRequired": st.just({"a": ["b"]}), "unevaluatedProperties": st.just(False),
        },
    )  # fmt: skip
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={"items": inner, "prefixItems": st.lists(inner, min_size=1, max_size=2), "minItems": SMALL, "maxItems": st.integers(1, 3), "uniqueItems": st.booleans(), "contains": inner},
    )  # fmt: skip
    logic = st.fixed_dictionaries(
        {},
        optional={"anyOf": st.lists(inner, min_size=1, max_size=2), "oneOf": st.lists(inner, min_size=1, max_size=2), "allOf": st.lists(inner, min_size=1, max_size=2), "not": inner, "if": inner, "then": inner, "else": inner},
    )  # fmt: skip
    return objects | arrays | logic


SCHEMAS = st.recursive(LEAVES, _containers, max_leaves=6)


def judged(schema: Any, values: list[Any]) -> Iterator[tuple[EnforcedSchema, Any, bool]]:
    """The enforced schema, unless it is refused, with each value, and whether jsonschema says that
    it is valid."""
    with suppress(CannotEnforce):
        made, oracle = enforce(schema), Draft202012Validator(schema)
        yield from ((made, value, oracle.is_valid(value)) for value in values)


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(SCHEMAS, st.lists(VALUES, min_size=10, max_size=10))
def test_no_invalid_value_is_ever_allowed(schema: Any, values: list[Any]) -> None:
    for made, value, is_valid in judged(schema, values):
        if not is_valid:
            assert not is_allowed(made, json.dumps(value)), (value, made)


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(SCHEMAS, st.lists(VALUES, min_size=10, max_size=10))
def test_valid_values_pass_the_checks_and_the_validator(schema: Any, values: list[Any]) -> None:
    for made, value, is_valid in judged(schema, values):
        if is_valid:
            text = json.dumps(value)
            assert SchemaValidator(made.validator).first_error(text) is None
            for check in made.checks:
                for part in values_at(value, check.path):
                    assert SchemaValidator(check.schema).first_error(json.dumps(part)) is None


def test_keywords_that_say_nothing_are_no_reason_for_a_check_or_a_refusal() -> None:
    """llguidance refuses a schema for their names alone."""
    silent = {"then": {"const": 3}, "uniqueItems": True, "maxContains": 1, "unevaluatedItems": False, "propertyNames": {"maxLength": 1}}  # fmt: skip
    made = enforce_normal_form({"type": "integer", **silent})
    assert made.checks == () and is_allowed(made, "4") and not is_allowed(made, '"a"')
    lists = enforce_normal_form({"type": "array", "uniqueItems": False, "else": {"maxItems": 1}})
    assert lists.checks == () and is_allowed(lists, "[1, 1]")
