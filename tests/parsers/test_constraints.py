"""Random answers of the constraints of formats that write each parameter by itself: their arguments satisfy the schema."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from radixrt.constrained import tool_calls
from radixrt.constrained.compiler.route import CompileOptions, compile_constraint
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.parsers.tool_calls.registry import FORMATS
from tests.parsers.test_formats import TOOLS, parsed_calls, with_marks

FORMS = ("qwen3_coder", "pythonic", "functiongemma")
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


def random_answer(matcher: Matcher, rng: random.Random) -> str | None:
    """A text that the grammar lets through; None: it does not end in time, or is no text."""
    facts = matcher.facts
    names = {token: name.encode() for name, token in facts.special_names.items()}
    row, text = np.zeros_like(facts.eos_mask), b""
    for _ in range(200):
        matcher.fill_mask(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little", count=facts.vocab_size)
        allowed = np.flatnonzero(bits).tolist()
        others = [token for token in allowed if token not in facts.eos_token_ids]
        if not others or (len(others) < len(allowed) and rng.random() < 0.5):
            try:
                return text.decode()
            except UnicodeDecodeError:
                return None
        closing = [t for t in others if t in names or facts.tokens[t][:1] in b"\"\n<>,}])'"]
        token = rng.choice(closing if closing and rng.random() < 0.5 else others)
        assert matcher.advance([token]) == 1
        text += names.get(token, facts.tokens[token])
    return None


@pytest.mark.parametrize("form", FORMS)
def test_what_a_constraint_lets_through_satisfies_the_schema_once_it_is_read(form: str) -> None:
    rng, facts, num_read = random.Random(form), with_marks(), 0
    for schema in SCHEMAS:
        tool = tool_calls.Tool.of("f_x", schema, True, "p")
        held = tool_calls.calls([tool], FORMATS[form], required=True, most=2)
        grammar = compile_constraint(held, facts, CompileOptions()).grammar
        for _ in range(6):
            text = random_answer(load_grammar(grammar, facts), rng)
            if text is None:
                continue
            content, calls = parsed_calls(form, [*text], {"f_x": schema}, in_pieces=True)
            assert calls and not content.strip(), text
            for name, arguments in calls:
                assert name == "f_x"
                jsonschema.validate(json.loads(arguments), {"type": "object"} | schema)
                num_read += 1
    assert num_read >= 20
