"""Advice on schemas: what it names is not exact, and what it proposes is."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from radixrt.cli.main import main
from radixrt.constrained.advice import REWRITINGS, Advice, finding, slow_steps
from radixrt.constrained.compiler.compilation import advise
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import JsonSchema, Lark
from radixrt.constrained.json_schema.enforcement import EnforcedSchema, enforce_json_schema
from tests.constrained.vocabularies import facts_of

OPTIONS = CompileOptions(backend="llguidance")
OBJECT = {"type": "object"}
CLOSED = {"type": "object", "additionalProperties": False}
LISTS = {"type": "array", "items": {"type": "integer"}}
BOTH = {"a": {"type": "integer"}, "b": {"type": "string"}}
CASES = {
    "anyOf": [
        {**CLOSED, "properties": {"kind": {"const": "n"}, "v": {"type": "integer"}}, "required": ["kind"]},
        {**CLOSED, "properties": {"kind": {"const": "s"}, "v": {"type": "string"}}, "required": ["kind"]},
    ]
}  # fmt: skip
FIRST = {"type": "array", "prefixItems": [{"const": 5}], "items": {"type": "integer"}, "minItems": 1}  # fmt: skip
IF = {
    **OBJECT,
    "if": {"patternProperties": {"^k": {"const": "n"}}},
    "then": {"properties": {"v": {"type": "integer"}}},
    "else": {"properties": {"v": {"type": "string"}}},
}
SEVERAL = {"type": "string", "minLength": 10, "maxLength": 90, "allOf": [{"pattern": "ab1"}, {"pattern": "bc1"}, {"pattern": "a12"}]}  # fmt: skip

LONG = {"type": "string", "minLength": 1000, "allOf": [{"pattern": "^([a-z][0-9])+$"}, {"pattern": "^((c1d3g3).{4,8}){6,6}"}, {"pattern": "(t|8){10,10}$"}]}  # fmt: skip
ONE = {"type": "string", "pattern": "^ab1bc1a12[a-z]*$"}
WIDE = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "contains": ({**LISTS, "contains": {"const": 5}}, FIRST),
    "format": ({"type": "string", "format": "regex"}, {"type": "string", "pattern": "^[a-z.*]*$"}),
    "if": (IF, CASES),
    "maxLength": (SEVERAL, ONE),
    "minLength": (LONG, ONE),
    "allOf": (LONG, ONE),
    "maxProperties": (
        {**OBJECT, "properties": BOTH, "maxProperties": 1},
        {**CLOSED, "properties": BOTH, "required": ["a"]},
    ),
    "minProperties": (
        {**OBJECT, "properties": BOTH, "minProperties": 1},
        {**CLOSED, "properties": BOTH, "minProperties": 1},
    ),
    "not": (
        {"type": "string", "not": {"pattern": "a"}},
        {"type": "string", "pattern": "^[b-z]*$"},
    ),
    "oneOf": (
        {"oneOf": [{**OBJECT, "patternProperties": {"^a": {"type": "integer"}}}, {**OBJECT, "patternProperties": {"^b": {"type": "string"}}}]},
        {"oneOf": CASES["anyOf"]},
    ),
    "pattern": (
        {"type": "string", "pattern": "^(?=.*a)b"},
        {"type": "string", "pattern": "^b.*a.*$"},
    ),
    "patternProperties": (
        {**OBJECT, "patternProperties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        {**OBJECT, "patternProperties": {"^a": {"type": "integer"}, "^b": {"type": "string"}}},
    ),
    "propertyNames": (
        {**OBJECT, "propertyNames": {"format": "regex"}, "additionalProperties": {"type": "integer"}},
        {**CLOSED, "patternProperties": {"^[a-z]+$": {"type": "integer"}}},
    ),
    "unevaluatedItems": (
        {"type": "array", "contains": {"type": "integer"}, "unevaluatedItems": False},
        {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "integer"}},
    ),
    "unevaluatedProperties": (
        {**OBJECT, "if": {"required": ["a"]}, "then": {"properties": BOTH}, "unevaluatedProperties": False},
        {**CLOSED, "properties": BOTH},
    ),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["red", "blue"]}, "uniqueItems": True},
        {**CLOSED, "properties": {"red": {"const": True}, "blue": {"const": True}}},
    ),
} | {word: ({word: (-1) ** ("Min" in word or "min" in word) * 9.727837981879871e26}, {word: 1e15}) for word in WIDE}  # fmt: skip
"""By keyword: a schema that is checked because of it, and the form that the advice proposes."""


def advice_on(schema: Any, **fields: Any) -> Advice:
    constraint = JsonSchema(schema=json.dumps(schema), **fields)
    return advise(constraint, facts_of("byte_level_json"), OPTIONS)


def enforced(schema: Any) -> EnforcedSchema:
    around = {**CLOSED, "properties": {"x": schema}, "required": ["x"]}
    return enforce_json_schema(json.dumps(around))


@pytest.mark.parametrize("keyword", sorted(REWRITINGS))
def test_each_rewriting_makes_the_keyword_exact(keyword: str) -> None:
    checked, exact = EXAMPLES[keyword]
    before = {left.keyword: finding(left, "it is checked") for left in enforced(checked).checked}
    assert before[keyword].pointer == f"/properties/x/{keyword}"
    assert before[keyword].advice == REWRITINGS[keyword]
    after = enforced(exact)
    assert after.checks == after.checked == ()


def test_what_a_grammar_enforces_needs_no_advice() -> None:
    begin = time.perf_counter()
    advice = advice_on({**CLOSED, "properties": BOTH})
    elapsed_ms = 1000 * (time.perf_counter() - begin)
    assert (advice.ok, advice.backend, advice.exact) == (True, "llguidance", True)
    assert (advice.checked, advice.unenforced, advice.slow, advice.error) == ((), (), (), None)
    assert 0 < advice.compile_ms < elapsed_ms
    assert advise(Lark(grammar='start: "a"'), facts_of("byte_level_json"), OPTIONS).exact


def test_what_is_left_out_without_strict_is_no_check() -> None:
    advice = advice_on({"type": "string", "pattern": "(?i:a)"}, strict=False)
    assert advice.ok and not advice.exact and not advice.checked
    assert [found.pointer for found in advice.unenforced] == ["/pattern"]


def test_a_refusal_names_the_place_and_what_would_help() -> None:
    schema = {**CLOSED, "properties": {"a/b": {"type": "string", "pattern": "(?i:a)"}}}
    advice = advice_on(schema)
    assert (advice.ok, advice.exact, advice.backend) == (False, False, None)
    assert advice.error is not None
    assert (advice.error.keyword, advice.error.pointer) == ("pattern", "/properties/a~1b/pattern")
    assert "plainer ECMA-262" in advice.error.advice and advice.error.advice in advice.error.message


PATTERN = r"^(?:\S+\s+){0,49}\S+$"


def test_a_slow_step_names_its_likeliest_cause() -> None:
    schema = {
        "type": "object",
        "properties": {
            "few": {"enum": ["a", "b"], "maxLength": 9},
            "te~xt": {"type": "string", "pattern": PATTERN, "maxLength": 500},
        },
    }
    steps = {
        each.step: each for each in slow_steps(json.dumps(schema), 300.0, 40.0, 'x": "', False)
    }
    assert {name: (step.ms, step.pointer) for name, step in steps.items()} == {
        "compile": (300.0, "/properties/te~0xt/pattern"),
        "mask": (40.0, "/properties/te~0xt/pattern"),
    }
    assert "up to 49 times" in steps["mask"].message and 'x": "' in steps["mask"].message
    assert "Write * or +" in steps["mask"].advice
    (compiling,) = slow_steps(json.dumps(schema), 300.0, 0.1, "", True)
    assert "no grammar enforces" in compiling.message and compiling.pointer == ""
    assert not list(slow_steps(json.dumps(schema), 1.0, 0.1, "", True))
    (other,) = slow_steps(None, 1.0, 9.0, "abc", False)
    assert other.message == "The mask after 'abc' takes 9.0 ms."


# ---------------------------------------------------------------- the command


def lint(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["lint-schema", *map(str, argv)])
    return int(caught.value.code or 0), capsys.readouterr().out


def test_the_exit_status_is_the_worst_finding(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    exact, checked, wrong = (
        tmp_path / name for name in ("exact.json", "checked.json", "wrong.json")
    )
    exact.write_text(json.dumps({**CLOSED, "properties": BOTH}))
    checked.write_text(json.dumps({**LISTS, "uniqueItems": True}))
    wrong.write_text("{")
    assert lint(capsys, exact)[0] == 0
    status, text = lint(capsys, exact, checked)
    assert status == 1 and "enforced exactly" in text and "/uniqueItems: " in text
    assert REWRITINGS["uniqueItems"] in text
    status, text = lint(capsys, exact, wrong, tmp_path / "absent.json")
    assert status == 2 and "not valid JSON" in text and "can't be read" in text


def test_advice_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "checked.json"
    file.write_text(json.dumps({**LISTS, "uniqueItems": True}))
    status, text = lint(capsys, "--json", file)
    (row,) = json.loads(text)
    assert status == 1 and row.pop("file") == str(file)
    assert row.keys() == {
        "ok",
        "backend",
        "exact",
        "checked",
        "unenforced",
        "slow",
        "compile_ms",
        "mask_ms",
    }
    assert row["checked"][0].keys() == {"keyword", "pointer", "message", "advice"}
