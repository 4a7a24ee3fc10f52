"""The tools of real agents compile, with bounded work, and of a set only the schemas of new tools
are normalised.

tool_sets.json has the tools that programs from npm and PyPI sent or listed, by the package, its
version and its license: names and JSON schemas, without the texts in them (descriptions, titles,
examples, defaults).
"""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from radixrt.base.errors import RequestError
from radixrt.constrained.backends.lark import LarkText
from radixrt.constrained.backends.tag_schemas import TagSchemas
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions, PoolConfig
from radixrt.constrained.compiler.pool import CompilePool
from radixrt.constrained.constraint import StructuralTag
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.tool_calls import Tool, calls
from radixrt.parsers.tool_calls.registry import FORMATS
from tests.constrained.test_matchers import accepts
from tests.constrained.vocabularies import KINDS, facts_of

KIND = "byte_level_json"
SETS: dict[str, Any] = json.loads((Path(__file__).parent / "tool_sets.json").read_text())
STYLES = ("hermes", "qwen3_coder")
MOST_PER_BYTE = 15
"""Of the tools' schemas: calls of Python functions, and bytes of the grammar. It is 6 to 12."""
ODD: dict[str, Any] = {
    "long": {"type": "string", "pattern": "\\S", "minLength": 1, "maxLength": 65536},
    "longer": {"type": "string", "maxLength": 524288},
    "any": {},
    "list": {"type": "array", "items": {}, "minItems": 1},
    "map": {"type": "object", "additionalProperties": {"type": "string"}},
}
"""Schemas of parameters at which grammars of other engines fail."""


def constraint_of(
    tools: Mapping[str, Any], style: str = "hermes", *, strict: bool = False
) -> StructuralTag:
    made = [Tool.from_schema(name, schema, strict, name) for name, schema in tools.items()]
    return calls(made, FORMATS[style], required=False, most=None)


def tools_of(name: str) -> dict[str, Any]:
    return {tool["name"]: tool["parameters"] for tool in SETS[name]["tools"]}


def test_there_are_twelve_sets_of_agents_and_servers() -> None:
    assert len(SETS) >= 12
    assert max(len(one["tools"]) for one in SETS.values()) >= 30
    assert {"claude-code", "codex", "opencode"} <= SETS.keys()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", SETS)
def test_the_work_for_a_set_is_proportional_to_its_size(name: str, style: str) -> None:
    """What takes 0.1 s at most on a vocabulary of 500; calls and bytes are the same on any
    machine."""
    tools, facts = tools_of(name), facts_of(KIND)
    size, num_calls = len(json.dumps(tools)), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    constraint = constraint_of(tools, style)
    sys.setprofile(count)
    try:
        compiled = compile_constraint(constraint, facts, CompileOptions())
    finally:
        sys.setprofile(None)
    assert num_calls < MOST_PER_BYTE * size and len(compiled.grammar.source) < MOST_PER_BYTE * size
    assert load_grammar(compiled.grammar, facts)


def test_odd_parameters_compile() -> None:
    tools = {name: {"type": "object", "properties": {"a": schema}} for name, schema in ODD.items()}
    tools |= {"empty": {}, "without": None}
    facts = facts_of(KIND)
    compiled = compile_constraint(constraint_of(tools), facts, CompileOptions())
    assert not compiled.unenforced

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    for name, arguments, is_valid in [
        ("long", '{"a": "x"}', True),
        ("long", '{"a": " "}', False),
        ("long", '{"a": ""}', False),
        ("any", '{"a": [1, {"b": null}]}', True),
        ("empty", '{"whatever": 1}', True),
        ("without", "{}", True),
        ("without", '{"a": 1}', False),
    ]:
        matcher = load_grammar(compiled.grammar, facts)
        assert accepts(matcher, facts, call(name, arguments)) is is_valid


@pytest.mark.parametrize("style", STYLES)
def test_of_a_changed_set_only_the_schemas_of_the_changed_tool_are_normalised(style: str) -> None:
    facts, tools = facts_of(KIND), tools_of("github")
    first = TagSchemas({})
    whole = compile_constraint(constraint_of(tools, style), facts, CompileOptions(), first)
    again = TagSchemas(first.made)
    assert compile_constraint(constraint_of(tools, style), facts, CompileOptions(), again) == whole
    assert first.num_made >= 20 and again.num_made == 0 and not again.made
    changed = tools | {"get_issue": {"type": "object", "properties": {"n": {"enum": [17]}}}}
    one = TagSchemas(first.made)
    compiled = compile_constraint(constraint_of(changed, style), facts, CompileOptions(), one)
    assert one.num_made == len(one.made) == 1
    fresh = compile_constraint(constraint_of(changed, style), facts, CompileOptions())
    assert compiled == fresh != whole


def test_the_pool_keeps_the_schemas_of_tools_for_all_its_helpers(tmp_path: Path) -> None:
    KINDS[KIND][0]().save(str(tmp_path / "tokenizer.json"))
    facts = facts_of(KIND)
    config = PoolConfig(
        tokenizer_json=str(tmp_path / "tokenizer.json"),
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
    )

    async def run() -> None:
        pool = CompilePool(config)
        pool.start()
        try:
            tools = tools_of("git")
            for index in range(4):  # more than there are helpers
                tools["git_log"] = {"type": "object", "properties": {"n": {"const": index}}}
                hits, misses = pool.schemas.hits, pool.schemas.misses
                compiled = await pool.compile(constraint_of(tools, strict=True))
                fresh = compile_constraint(
                    constraint_of(tools, strict=True), facts, CompileOptions()
                )
                assert compiled == fresh
                if index:
                    found = pool.schemas.hits - hits, pool.schemas.misses - misses
                    assert found == (len(tools) - 1, 1)
        finally:
            await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"type": "string", "minLength": "1"}, "/properties/x/minLength"),
        ({"type": "strin"}, "/properties/x/type"),
        ({"$ref": "#/$defs/nope"}, "/properties/x/$ref"),
    ],
)
def test_errors_name_the_tool_and_the_pointer(schema: Any, pointer: str, style: str) -> None:
    tools = tools_of("github") | {"bad": {"type": "object", "properties": {"x": schema}}}
    with pytest.raises(RequestError) as refused:
        compile_constraint(
            constraint_of(tools, style, strict=True), facts_of(KIND), CompileOptions()
        )
    assert "the tool 'bad'" in refused.value.message and pointer in refused.value.message


def test_errors_of_the_whole_grammar_name_them_too() -> None:
    """No schema is wrong by itself here; the library refuses the text that is written for it."""
    properties = {"y": {"type": "string"}, "x": {"type": "string", "minLength": 200_000}}
    tools = tools_of("git") | {"bad": {"type": "object", "properties": properties}}
    with pytest.raises(RequestError, match="In the tool 'bad' at /properties/x: "):
        constraint = constraint_of(tools, "qwen3_coder")
        compile_constraint(constraint, facts_of(KIND), CompileOptions())


def test_thousands_of_control_tokens_cost_a_text_nothing() -> None:
    control = {f"<unused_{index}>": index for index in range(20_000)}
    text, begin = LarkText(control), time.process_time()
    for index in range(500):
        assert text.literal(f'{{"name": "tool_{index}"}}<unused_7>').endswith(" <[7]>")
        assert not text.names_control_token(f"tool_{index}")
    assert time.process_time() - begin < 1.0
