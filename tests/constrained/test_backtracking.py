"""Where retries leave failed values, and that what failed does not come back in another
spelling."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.constrained.grammar import SpanError
from radixrt.tokenizer.retry.backtracking import (
    BacktrackPoint,
    FailedSpan,
    choose_backtrack_point,
    locate,
    ruler,
)
from radixrt.tokenizer.retry.exclusions import Exclusions, TokenTexts
from tests.constrained.checked_decoding import CASES, validate_span
from tests.constrained.test_spans import spans_of, values, write


def failed(
    schema: Any, *texts: str, num_failures: int = 1, spent: tuple[int, ...] = ()
) -> FailedSpan:
    """Tokens 0, 1, 2, … with these texts, which are a value that is not valid."""
    text = "".join(texts)
    errors = validate_span(schema, text)
    assert errors, "the value is valid"
    starts = [len("".join(texts[:index])) for index in range(len(texts))]
    return FailedSpan(
        text, 0, [*range(len(texts))], starts, frozenset(spent), errors, num_failures=num_failures
    )


def kept_by(schema: Any, *texts: str, num_failures: int = 1, spent: tuple[int, ...] = ()) -> str:
    """What is kept of the value."""
    point = choose_backtrack_point(failed(schema, *texts, num_failures=num_failures, spent=spent))
    assert point is not None
    return "".join(texts[: point.depths[0]])


UNIQUE = {"uniqueItems": True}


def test_the_likeliest_cause_is_replaced_first() -> None:
    assert kept_by(UNIQUE, "[", "1", ",", "2", ",", "1", ",", "3", "]") == "[1,2,"
    assert kept_by(UNIQUE, '["', "a", '","', "a", '"]') == '["a","'
    assert kept_by({"contains": {"const": 5}}, "[", "1", ",", "2", "]") == "[1,2"
    a_or_b = {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert kept_by(a_or_b, "{", '"a":', "1", ",", '"b":', "2", "}") == '{"a":1'
    needs_b = {"dependentRequired": {"a": ["b"]}}
    assert kept_by(needs_b, "{", '"a":', "1", ",", '"c":', "2", "}") == '{"a":1,"c":2'
    kind = {"not": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}}
    assert kept_by(kind, '{"', "kind", '":"', "x", '","z":', "1", "}").startswith('{"kind":"')
    bound = {"if": {"required": ["a"]}, "then": {"properties": {"n": {"minimum": 5}}}}
    assert kept_by(bound, '{"a":', "1", ',"n":', "2", ',"z":', "3", "}") == '{"a":1,"n":'


def test_later_retries_go_elsewhere_and_spent_places_are_left_out() -> None:
    tokens = ["[", "1", ",", "2", ",", "1", "]"]
    kept = {kept_by(UNIQUE, *tokens, num_failures=number) for number in (1, 2, 4, 8)}
    assert len(kept) == 4
    assert kept_by(UNIQUE, *tokens, spent=(5,)) != "[1,2,"
    assert choose_backtrack_point(failed(UNIQUE, *tokens, spent=tuple(range(7)))) is None


@settings(deadline=None)
@given(st.integers(1, 10_000))
def test_the_ruler_says_how_often_two_divides(number: int) -> None:
    level = ruler(number)
    assert number % 2**level == 0 and number % 2 ** (level + 1)


@settings(deadline=None)
@given(values, st.data())
def test_parts_are_where_the_standard_library_finds_them(value: Any, ways: st.DataObject) -> None:
    text = write(value, ways)
    start = len(text) - len(text.lstrip())
    whole = locate(text, start)
    for path, begin, end in spans_of(text):
        part = whole.find(path)
        assert (part.start, part.end) == (begin, end)
        assert begin <= part.content_start <= end
    leaves = [span for path, *span in spans_of(text) if text[span[0]] not in "[{"]
    assert leaves == [[leaf.start, leaf.end] for leaf in whole.leaves() if not leaf.is_container]


vocabularies = st.lists(st.text("ab,] ", min_size=1, max_size=4), max_size=20)


@settings(deadline=None)
@given(vocabularies, st.text("ab,] ", min_size=1, max_size=6))
def test_tokens_along_a_text_are_those_that_begin_it_or_end_it(
    tokens: list[str], text: str
) -> None:
    along = TokenTexts(enumerate(tokens)).along(text)
    expected = [
        (token, len(piece))
        for token, piece in enumerate(tokens)
        if text.startswith(piece) or re.match(rf"{re.escape(text)}[,\]}}\s]", piece)
    ]
    assert sorted(along) == expected


# ---------------------------------------------------------------- exclusions

TOKENS = ['"', "r", "re", "red", "ro", "o", "d", "e", "ed", "rose", "se", "s", "b", '",', "x"]


class Speller:
    """A worker that writes one of some strings, token by token, and prefers tokens in the order
    given."""

    def __init__(self, options: list[str], preference: list[int]) -> None:
        self.options, self.preference = options, preference

    def write(self, excluded: list[list[int]]) -> list[int]:
        tokens: list[int] = []
        text = ""
        while text not in self.options:
            allowed = [
                token
                for token in self.preference
                if any(option.startswith(text + TOKENS[token]) for option in self.options)
            ]
            left = [token for token in allowed if [*tokens, token] not in excluded]
            tokens.append((left or allowed)[0])
            text += TOKENS[tokens[-1]]
        return tokens


@pytest.mark.parametrize("along", [True, False])
@settings(deadline=None)
@given(
    preference=st.permutations(range(len(TOKENS))),
    good=st.sampled_from(["rose", "red", "bed", "b"]),
)
def test_one_good_string_among_bad_ones_is_found(
    along: bool, preference: list[int], good: str
) -> None:
    """However the strings share their beginnings, and however they are spelled."""
    options = [f'{word}"' for word in ("rose", "red", "bed", "b", "robe")]
    speller = Speller(options, list(preference))
    exclusions = Exclusions(TokenTexts(enumerate(TOKENS)).along if along else None)
    seen: list[list[int]] = []
    for _ in range(100):
        tokens = speller.write(exclusions.after([]))
        text = "".join(TOKENS[token] for token in tokens)
        if text == f'{good}"':
            return
        seen.append(tokens)
        dead = exclusions.conclude(tokens)
        depths = [depth for depth in range(len(tokens)) if depth not in dead]
        assert depths, "there is another string"
        starts = [len("".join(TOKENS[t] for t in tokens[:depth])) for depth in range(len(tokens))]
        span = FailedSpan(text, 0, tokens, starts, dead, [])
        exclusions.add(tokens, 0, span, BacktrackPoint(depths, len(text)))
    raise AssertionError(seen)


def test_paths_survive_a_return_to_an_earlier_point() -> None:
    exclusions = Exclusions(None)
    span = FailedSpan("12", 0, [1, 2], [0, 1], frozenset(), [])
    exclusions.add([9, 8, 1, 2], 2, span, BacktrackPoint([1], 2))
    assert exclusions.after([9, 8, 1]) == [[2]]
    earlier = FailedSpan("912", 0, [9, 8, 1, 2], [0, 1, 1, 2], frozenset(), [])
    exclusions.add([9, 8, 1, 2], 0, earlier, BacktrackPoint([0], 3))
    assert sorted(exclusions.after([])) == [[9], [9, 8, 1, 2]]
    assert exclusions.after([9, 8]) == [[1, 2]] and exclusions.after([9, 7]) == []
    exclusions.forget_before(2, [9, 8])
    assert exclusions.after([9, 8]) == [[1, 2]]


# ---------------------------------------------------------------- validators


@settings(deadline=None)
@given(values, st.sampled_from([case for case in CASES]), st.data())
def test_the_validator_finds_errors_where_jsonschema_does(
    value: Any, case: Any, ways: st.DataObject
) -> None:
    for schema in (case.schema, *(check.schema for check in case.checks)):
        errors = validate_span(schema, write(value, ways))
        assert bool(errors) != jsonschema.Draft202012Validator(schema).is_valid(value)


@pytest.mark.parametrize(
    "schema, text, error",
    [
        (UNIQUE, "[1,2,1.0,3]", SpanError((), "uniqueItems", "", ((2,),))),
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            '{"a":1,"x":0,"b":2}',
            SpanError((), "oneOf", "", (), (("a",), ("b",))),
        ),
        (
            {"dependentRequired": {"a": ["b"]}},
            '{"x":0,"a":1}',
            SpanError((), "dependentRequired", "", (), (("a",),)),
        ),
        (
            {"not": {"properties": {"k": {"const": "x"}}}},
            '{"z":1,"k":"x"}',
            SpanError((), "not", "", (("k",),)),
        ),
        (
            {"properties": {"a": {"anyOf": [{"items": {"minimum": 3}}, {"type": "string"}]}}},
            '{"a":[1]}',
            SpanError(("a", 0), "minimum", ""),
        ),
        ({"format": "date"}, '"2024-13-01"', SpanError((), "format", "")),
    ],
)
def test_errors_name_their_causes(schema: Any, text: str, error: SpanError) -> None:
    [found] = validate_span(schema, text)
    assert found.message
    assert (found.path, found.keyword) == (error.path, error.keyword)
    assert (found.unsuited, found.superfluous) == (error.unsuited, error.superfluous)


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "1" * 5_000, "NaN"])
def test_what_can_not_be_read_or_validated_is_not_valid(text: str) -> None:
    [error] = validate_span({"items": {"multipleOf": 0.3}}, text)
    assert "can't be" in error.message


def test_numbers_are_exact() -> None:
    assert validate_span({"items": {"multipleOf": 0.3}}, "[0.9, 3e999]") == []
    [error] = validate_span({"items": {"multipleOf": 0.3}}, "[1e999]")
    assert error.keyword == "multipleOf"


@pytest.mark.parametrize("number", ["9" * 4_000, "1e999", "-1e-999", "1.5e308"])
def test_numbers_without_bounds_do_no_harm(number: str) -> None:
    [error] = validate_span({"not": {"required": ["n"]}}, f'{{"n":{number}}}')
    assert error.keyword == "not" and error.superfluous == (("n",),)


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        ({"type": "array"}, "-4E4561", False),
        ({"not": {"multipleOf": 2}}, "1e6000", False),
        ({"multipleOf": 2}, "1e6000", True),
        ({"multipleOf": 3}, "1e999999999", False),
        ({"multipleOf": 0.5}, "15e-1", True),
        ({"multipleOf": 0.5}, "1e-999999999", False),
        ({"type": "integer"}, "1e999999999", True),
        ({"type": "integer"}, "15e-1", False),
        ({"not": {"type": "integer"}}, "1e9999999999999999999", False),
    ],
)
def test_numbers_of_any_size_are_validated_at_once(schema: Any, text: str, valid: bool) -> None:
    assert (validate_span(schema, text) == []) is valid


@pytest.mark.parametrize(
    "text", ["[[1],[true],[1]]", "[[0],[false],[0.0]]", '[{"a":1},2,{"a":1.0}]']
)
def test_repeated_items_are_found_whatever_is_between_them(text: str) -> None:
    [error] = validate_span({"uniqueItems": True}, text)
    assert error.unsuited == ((2,),)


def test_numbers_are_no_booleans_among_unique_items() -> None:
    assert (
        validate_span({"uniqueItems": True}, '[1, true, 0, false, [1], [true], "1", {}, []]') == []
    )


def test_validation_leaves_no_trace_of_the_search_for_causes() -> None:
    schema = {"not": {"required": ["a", "b"]}}
    text = json.dumps({"a": [1, {"z": "x"}], "b": "y", "c": None})
    assert validate_span(schema, text) == validate_span(schema, text)


def test_a_wrong_schema_is_an_error() -> None:
    with pytest.raises(jsonschema.SchemaError):
        validate_span({"type": "no such type"}, "1")
