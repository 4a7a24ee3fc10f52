"""Random schemas and values: jsonschema judges both the original and the normalised schema."""

from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.constrained.errors import CannotEnforce
from radixrt.constrained.json_schema.keywords import without_origins
from radixrt.constrained.json_schema.normal.normalize import normalize
from tests.suite import examples

NAMES = st.sampled_from(["a", "b", "ab"])
NUMBERS = st.sampled_from([-1, 0, 1, 2, 0.5, 1.0, 3])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.sampled_from(["", "a", "b", "ab", "abc"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
SIZES = st.integers(0, 3)
KINDS = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])
PATTERNS = st.sampled_from(["a", "^a", "b$", "^ab$"])
REFERENCES = st.sampled_from(["#/$defs/one", "#/$defs/two"])


def words(inner: st.SearchStrategy[Any], references: bool) -> st.SearchStrategy[dict[str, Any]]:
    """A schema of a few keywords, those that hold schemas of ``inner`` among them."""
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": KINDS | st.lists(KINDS, min_size=1, max_size=3, unique=True),
        "const": VALUES,
        "enum": st.lists(VALUES, min_size=1, max_size=4),
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "exclusiveMinimum": NUMBERS,
        "exclusiveMaximum": NUMBERS,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
        "minLength": SIZES,
        "maxLength": SIZES,
        "pattern": PATTERNS,
        "prefixItems": some,
        "items": inner,
        "contains": inner,
        "minContains": SIZES,
        "maxContains": SIZES,
        "minItems": SIZES,
        "maxItems": SIZES,
        "uniqueItems": st.booleans(),
        "unevaluatedItems": inner,
        "properties": named,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "required": st.lists(NAMES, max_size=2, unique=True),
        "minProperties": SIZES,
        "maxProperties": SIZES,
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2, unique=True), max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=2),
        "unevaluatedProperties": inner,
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
    }  # fmt: skip
    if references:
        keywords["$ref"] = REFERENCES
    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({word: keywords[word] for word in chosen})
    )


LEAVES = st.booleans() | words(st.booleans() | words(st.booleans(), False), False)
SCHEMAS = st.recursive(LEAVES, lambda inner: words(inner, True), max_leaves=6)
DOCUMENTS = st.tuples(SCHEMAS, SCHEMAS, SCHEMAS).map(
    lambda parts: {
        **(parts[0] if isinstance(parts[0], dict) else {"allOf": [parts[0]]}),
        "$defs": {"one": parts[1], "two": parts[2]},
    }
)


def plausible(schema: Any) -> list[Any]:
    """Values that the schema mentions, and some that it does not."""
    found: list[Any] = [None, True, 0, 1, 2, 0.5, "", "a", "ab", "abcd", [], [1], ["a", "a"], {}]
    found += [{"a": 1}, {"b": "a"}, {"a": 1, "b": 1}, {"ab": None, "a": "a"}, [0, 1, 2], [[], {}]]
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if "const" in part:
                found.append(part["const"])
            found.extend(part.get("enum", ()) if isinstance(part.get("enum"), list) else ())
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
    return found


DRAFT = "https://json-schema.org/draft/2020-12/schema"


@settings(max_examples=examples(400), deadline=None)
@given(DOCUMENTS, st.lists(VALUES, min_size=5, max_size=15))
def test_a_normalised_schema_accepts_what_the_original_accepts(
    schema: Any, values: list[Any]
) -> None:
    original = jsonschema.Draft202012Validator(schema)
    candidates = values + plausible(schema)
    try:
        normalised = normalize({"$schema": DRAFT, **schema} if isinstance(schema, dict) else schema)
    except CannotEnforce as error:
        if "No value satisfies" not in error.reason:
            assert error.keyword == "$ref"
            return
        normalised = False
    result = jsonschema.Draft202012Validator(without_origins(normalised))
    for value in candidates:
        assert result.is_valid(value) == original.is_valid(value), (schema, normalised, value)
