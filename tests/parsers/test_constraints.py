"""Random answers of the constraints of formats that write each parameter by itself: their arguments
satisfy the schema. ``make constraint-matrix`` has more of them."""

import json
import os
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from radixrt.base.errors import RequestError
from radixrt.constrained import tool_calls
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import JsonSchema
from radixrt.constrained.grammar import CheckedTags, Compiled
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.parsers.tool_calls.registry import FORMATS
from radixrt.tokenizer.retry.spans import CompletedSpan
from radixrt.tokenizer.retry.tags import TagTracker
from tests.constrained.test_compilation import takes
from tests.parsers.test_formats import TOOLS, parsed_calls, with_marks

FORMS = ("qwen3_coder", "minimax_m2", "glm47", "pythonic", "olmo3", "functiongemma", "gemma4")
SCHEMAS: list[dict[str, Any]] = [
    TOOLS["get_weather"],
    {
        "properties": {
            "a": {"type": ["string", "null"], "minLength": 2, "maxLength": 4},
            "b": {"type": ["boolean", "null"]},
            "c": {"enum": ["x", None, 1, True, "null"]},
            "d": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
        },
        "required": ["b", "d"],
    },
    {"additionalProperties": {"type": "integer"}},
    {"additionalProperties": {"type": "string", "maxLength": 5}},
    {
        "properties": {
            "p": {"$ref": "#/$defs/q"},
            "o": {
                "type": "object",
                "properties": {"z": {"type": "boolean"}, "s": {"type": "string", "maxLength": 4}},
                "required": ["z", "s"],
            },
            "n": {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": 3}]},
        },
        "required": ["p", "o", "n"],
        "$defs": {"q": {"type": "string", "enum": ["one", "two three", ""]}},
    },
    {
        "properties": {
            "x": {"const": True},
            "w": {"type": "string", "maxLength": 0},
            "v": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        },
        "required": ["x", "w", "v"],
    },
    {
        "properties": {
            "when": {"type": "string", "format": "date"},
            "l": {
                "type": "array",
                "items": {"type": ["string", "null"], "maxLength": 3},
                "maxItems": 3,
            },
        },
        "required": ["when", "l"],
    },
]


EVERY_SCRIPT = "RADIXRT_EVERY_SCRIPT" in os.environ
ENOUGH = 100 if EVERY_SCRIPT else 20
"""Checked values to be found in random answers."""
ANSWERS = 20 if EVERY_SCRIPT else 4
"""Random answers of each schema."""

HUGE = re.compile(r"\d[eE]\+?\d{3}")
"""A number that no float holds. A call with one is read as text, since clients could not read its
arguments."""


def random_answer(matcher: Matcher, rng: random.Random) -> str | None:
    """A text that the grammar lets through; None: it does not end in time, or is no text."""
    facts = matcher.facts
    names = {token: name.encode() for name, token in facts.special_names.items()}
    ends = np.array([token in facts.eos_token_ids for token in range(facts.vocab_size)])
    closes = np.array([t in names or facts.tokens[t][:1] in b"\"\n<>,}])'" for t in range(facts.vocab_size)])  # fmt: skip
    row, text = np.zeros_like(facts.eos_mask), b""
    for _ in range(400):
        matcher.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=facts.vocab_size)
        allowed = np.flatnonzero(bits)
        others = allowed[~ends[allowed]]
        if not len(others) or (len(others) < len(allowed) and rng.random() < 0.5):
            try:
                return text.decode()
            except UnicodeDecodeError:
                return None
        closing = others[closes[others]]
        token = int(rng.choice(closing if len(closing) and rng.random() < 0.5 else others))
        assert matcher.advance([token]) == 1
        text += names.get(token, facts.tokens[token])
    return None


CHECKED: dict[str, Any] = {
    "properties": {
        "t": {"type": "string", "maxLength": 9},
        "u": {"$ref": "#/$defs/unique"},
        "n": {"type": ["string", "null"], "maxLength": 3},
        "o": {
            "type": "object",
            "properties": {"m": {"type": "integer", "minimum": 0, "not": {"multipleOf": 7}}},
            "required": ["m"],
        },
    },
    "required": ["u", "o"],
    "$defs": {"unique": {"type": "array", "items": {"enum": [1, "</x>", "'"]}, "uniqueItems": True, "maxItems": 3}},
}  # fmt: skip


def calls_of_checked(form: str, required: bool) -> Compiled:
    """The constraint of up to three calls of three tools."""
    tools = [tool_calls.Tool.from_schema(name, CHECKED, True, "p") for name in ("f", "f_x")]
    tools.append(
        tool_calls.Tool.from_schema("any", {"additionalProperties": {"type": "string"}}, True, "p")
    )
    held = tool_calls.calls(tools, FORMATS[form], required=required, most=3)
    return compile_constraint(held, with_marks(), CompileOptions())


@pytest.mark.parametrize("form", FORMS)
def test_the_checked_values_of_a_call_are_those_of_its_arguments(form: str) -> None:
    """Whether calls are required or not: then text may stand before them, but in one form."""
    rng, facts, num_found = random.Random(form), with_marks(), 0
    answers = calls_of_checked(form, True)
    checks_and_begins = [
        (answers.checks, ""),
        (calls_of_checked(form, False).checks, "" if form == "pythonic" else "I look: "),
    ]
    for _ in range(3 * ENOUGH):
        answer = random_answer(load_grammar(answers.grammar, facts), rng)
        if answer is None:
            continue
        found = []
        for checks, begin in checks_and_begins:
            assert isinstance(checks, CheckedTags)
            found = values_are_those_of_the_calls(form, checks, begin + answer)
        if (num_found := num_found + len(found)) >= ENOUGH:
            break
    assert num_found >= 20
    checks, _ = checks_and_begins[1]
    assert isinstance(checks, CheckedTags)
    plain = TagTracker(checks)
    assert plain.push("no call, [f_x(u=[1, 1])]") + plain.finish() == []


def values_are_those_of_the_calls(form: str, checks: CheckedTags, text: str) -> list[CompletedSpan]:
    """Assert that a tracker finds the checked arguments of an answer, as its parser reads them;
    returns what it finds."""
    tracker = TagTracker(checks)
    found = [span for character in text for span in tracker.push(character)] + tracker.finish()
    _, calls = parsed_calls(
        form, [text], {"f": CHECKED, "f_x": CHECKED, "any": {}}, in_pieces=False
    )
    wanted = []
    for name, arguments in calls:
        values = json.loads(arguments)
        if name != "any":
            wanted += [
                ("/$defs/unique", values["u"]),
                ("/properties/o/properties/m", values["o"]["m"]),
            ]
    assert [(s.check.pointer, json.loads(text[s.start : s.end])) for s in found] == wanted, text
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_check_that_would_need_more_than_one_json_value_is_refused(form: str) -> None:
    null = {"functiongemma": ["null"], "gemma4": ["null"], "pythonic": ["null", "boolean"]}.get(
        form
    )
    schemas: list[tuple[dict[str, Any], str]] = [
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired")
    ]
    if null:
        either = {"type": ["array", *null], "uniqueItems": True, "not": {"const": []}, "items": {}}
        schemas.append(
            (
                {"properties": {"a": {"oneOf": [either, {"type": [*null]}, {"minItems": 3}]}}},
                "as a whole",
            )
        )
    for schema, reason in schemas:
        held = tool_calls.calls(
            [tool_calls.Tool.from_schema("f", schema, True, "p")],
            FORMATS[form],
            required=True,
            most=1,
        )
        with pytest.raises(RequestError, match=f"In the tool 'f': .*{reason}"):
            compile_constraint(held, with_marks(), CompileOptions())


@pytest.mark.parametrize("form", FORMS)
def test_what_a_constraint_lets_through_satisfies_the_schema_once_it_is_read(form: str) -> None:
    rng, facts, num_read = random.Random(form), with_marks(), 0
    for schema in SCHEMAS:
        tool = tool_calls.Tool.from_schema("f_x", schema, True, "p")
        held = tool_calls.calls([tool], FORMATS[form], required=True, most=2)
        grammar = compile_constraint(held, facts, CompileOptions()).grammar
        for _ in range(ANSWERS):
            text = random_answer(load_grammar(grammar, facts), rng)
            if text is None or HUGE.search(text):
                continue
            content, calls = parsed_calls(form, [*text], {"f_x": schema}, in_pieces=True)
            assert calls and not content.strip(), text
            for name, arguments in calls:
                assert name == "f_x"
                jsonschema.validate(json.loads(arguments), {"type": "object"} | schema)
                num_read += 1
    assert num_read >= 20


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
ONE_CALL = {
    "lfm2": "<|tool_call_start|>[f(a=[1, 1])]<|tool_call_end|>",
    "nemotron_json": '<TOOLCALL>[{"name": "f", "arguments": {"a": [1, 1]}}]</TOOLCALL>',
    "falcon": '<tool_call>\n[\n{"name": "f", "arguments": {"a": [1, 1]}}\n]\n</tool_call>',
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"a": [1, 1]}}',
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": [1, 1]}',
    "mistral_v3": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, 1]}}]',
    "phi4_mini": 'functools[{"name": "f", "arguments": {"a": [1, 1]}}]',
    "pythonic": "[f(a=[1, 1])]",
    "functiongemma": "<start_function_call>call:f{a:[1, 1]}<end_function_call>",
    "gemma4": "<|tool_call>call:f{a:[1, 1]}<tool_call|>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n[1, 1]\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=a>[1, 1]</parameter>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">[1, 1]</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1, 1]</arg_value>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>[1, 1]</arg_value></tool_call>",
    "granite": '<|tool_call|>[{"name": "f", "arguments": {"a": [1, 1]}}]',
    "deepseek_v3": '<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>f\n```json\n{"a": [1, 1]}\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
    "deepseek_v31": '<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>f<\uff5ctool▁sep\uff5c>{"a": [1, 1]}<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>',
    "kimi_k2": '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": [1, 1]}<|tool_call_end|><|tool_calls_section_end|>',
    "hunyuan": '<tool_calls><tool_call>f\n```json\n{"a": [1, 1]}\n```</tool_call></tool_calls>',
    "exaone4": '<tool_call>{"name": "f", "arguments": {"a": [1, 1]}}</tool_call>',
    "olmo3": "<function_calls>f(a=[1, 1])</function_calls>",
}


@pytest.mark.parametrize("form", ONE_CALL)
@pytest.mark.parametrize("kind", ["object", "array", None])
def test_an_answer_is_one_call_or_json_where_they_can_be_told_apart(
    form: str, kind: str | None
) -> None:
    written, facts, call = FORMATS[form], with_marks(), ONE_CALL[form]
    of_a = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"]}
    schema, text = {"object": (of_a, '{"a": [2, 2]}'), "array": (UNIQUE, "[2, 2]")}.get(
        kind or "", ({"uniqueItems": True}, "[2, 2]")
    )
    content = JsonSchema(schema=json.dumps(schema))
    cannot = {"llama3_json": ("object", None), "pythonic": ("array", None)}.get(form, ())
    assert written.is_told_from(content) == (kind not in cannot)
    if kind in cannot:
        return
    tools = [tool_calls.Tool.from_schema(name, of_a, True, "p") for name in ("f", "g")]
    constraint = tool_calls.one_call_or_json(tools, written, content)
    checks = compile_constraint(constraint, facts, CompileOptions()).checks
    assert isinstance(checks, CheckedTags)
    for good, value in ((call, "[1, 1]"), (text, "[2, 2]")):
        assert takes(constraint, facts, good)
        tracker = TagTracker(checks)
        found = [span for character in good for span in tracker.push(character)] + tracker.finish()
        assert [good[span.start : span.end] for span in found] == [value]
        read = parsed_calls(form, [*good], {"f": of_a}, in_pieces=True, calls_alone=True)
        assert read == (("", [("f", '{"a": [1, 1]}')]) if good == call else (text, []))
    for bad in ("hi", call + text, call + call, text + call):
        assert not takes(constraint, facts, bad)
