"""The harmony format of gpt-oss: whole answers however they are cut, and random answers of its
constraints."""

import functools
import itertools
import json
import random
from typing import Any, NamedTuple

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.constrained import tool_calls
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import AnyJson, JsonSchema, StructuralTag
from radixrt.constrained.grammar import CheckedTags
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.messages.message import ToolCall
from radixrt.parsers.harmony import MARKS, HarmonyParser
from radixrt.parsers.tool_calls.parser import ToolCallParser
from radixrt.parsers.tool_calls.registry import FORMATS
from radixrt.tokenizer.retry.tags import TagTracker
from tests.constrained.test_compilation import takes
from tests.constrained.vocabularies import byte_level_json
from tests.parsers.test_constraints import SCHEMAS, random_answer
from tests.parsers.test_formats import TOOLS
from tests.parsers.test_tool_calls import join

HARMONY = FORMATS["harmony"]
THOUGHT = "<|channel|>analysis<|message|>Which < one?\n<|end|>"
ARGUMENTS = '{"location": "Paris, <|end|> of the world"}'
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
PARIS = ("get_weather", ARGUMENTS)


class Output(NamedTuple):
    text: str
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    end: int | None
    """Of the reasoning."""


OUTPUTS = {
    "final": Output("<|channel|>final<|message|>Hello <b>", "", "Hello <b>", [], 0),
    "thought": Output(
        f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Hi",
        "Which < one?\n",
        "Hi",
        [],
        len(THOUGHT),
    ),
    "typed final": Output(
        f"{THOUGHT}<|start|>assistant<|channel|>final <|constrain|>json<|message|>{{}}",
        "Which < one?\n",
        "{}",
        [],
        len(THOUGHT),
    ),
    "call": Output(
        f"{THOUGHT}<|start|>assistant{CALL}{{}}<|call|>",
        "Which < one?\n",
        "",
        [("get_weather", "{}")],
        len(THOUGHT),
    ),
    "recipient in the role": Output(
        f"{THOUGHT}<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{{}}",
        "Which < one?\n",
        "",
        [("get_weather", "{}")],
        len(THOUGHT),
    ),
    "recipient first": Output(
        " to=functions.now<|channel|>analysis<|message|>", "", "", [("now", "{}")], 0
    ),
    "several thoughts and a text before the call": Output(
        f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{THOUGHT}"
        f"<|start|>assistant{CALL}{{}}<|call|>",
        "Which < one?\n\nWhich < one?\n",
        "I look.",
        [("get_weather", "{}")],
        len(THOUGHT),
    ),
    "a tool that nobody offered": Output(
        "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", [], None
    ),
    "arguments that are no JSON": Output(CALL + "[1]", "", CALL + "[1]", [], 0),
    "without marks": Output("Hello <|there", "", "Hello <|there", [], 0),
    "without an end": Output(
        "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Yes", "Hm", "Yes", [], 32
    ),
    "cut off in a header": Output(
        f"{THOUGHT}<|start|>assistant{CALL[:-14]}", "Which < one?\n", "", [], None
    ),
}
CUTS = st.lists(st.integers(0, 300))


def parse(parser: HarmonyParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parts = [*(parser.push(piece) for piece in pieces), parser.push("", is_last=True)]
    calls: list[ToolCall] = join([call for *_, calls in parts for call in calls])
    assert [call.index for call in calls] == list(range(len(calls)))
    return (
        "".join(reasoning for reasoning, *_ in parts),
        "".join(content for _, content, _ in parts),
        [(call.name, call.arguments) for call in calls],
    )


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_an_answer_is_split_however_it_is_cut(output: Output) -> None:
    text = output.text
    for pieces in ([text], [*text], *([text[:at], text[at:]] for at in range(len(text)))):
        parser = HarmonyParser("...<|end|><|start|>assistant", calls=True)
        assert parse(parser, pieces) == (output.reasoning, output.content, output.calls)
        assert parser.end == output.end


@given(cuts=CUTS)
@pytest.mark.parametrize("text", [THOUGHT, "thought"], ids=["a thought", "a text"])
def test_the_prompt_may_have_begun_the_answer(text: str, cuts: list[int]) -> None:
    opened = "<|start|>assistant<|channel|>analysis<|message|>So "
    rest = "be it.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    parser = HarmonyParser(f"<|end|>{opened}")
    assert parse(parser, pieces_of(rest, cuts)) == ("be it.", "Yes", [])
    final = HarmonyParser("<|start|>assistant<|channel|>final<|message|>")
    assert parse(final, pieces_of("Yes", cuts)) == ("", "Yes", []) and final.end == 0


def test_a_call_is_content_where_no_tools_are_offered() -> None:
    assert parse(HarmonyParser(), [CALL + "{}"]) == ("", "{}", [])


@given(cuts=CUTS)
def test_only_control_tokens_are_marks_where_they_are_told(cuts: list[int]) -> None:
    """A thought may quote the format."""
    quoted = "say <|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}"
    pieces = ["<|channel|>", "analysis", "<|message|>", quoted, "<|end|>", "<|start|>", "assistant",
              "<|channel|>", "final", "<|message|>", quoted]  # fmt: skip
    parser = HarmonyParser(calls=True, marks_are_given=True)
    ends = list(itertools.accumulate(map(len, pieces)))
    for piece, end in zip(pieces, ends, strict=True):
        if piece in MARKS:
            parser.add_mark(end)
    assert parse(parser, pieces_of("".join(pieces), cuts)) == (quoted, quoted, [])


@given(cuts=CUTS)
def test_an_answer_under_a_grammar_ends_with_its_content_or_its_call(cuts: list[int]) -> None:
    content = json.dumps({"a": f"{CALL} <|end|>"})
    begun = (
        f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant"
    )
    parser = HarmonyParser(is_held=True)
    text = f"{begun}<|channel|>final<|message|>{content}"
    assert parse(parser, pieces_of(text, cuts)) == ("Which < one?\n\nHm.", content, [])
    calling = HarmonyParser(is_held=True, calls=True, in_pieces=True)
    found = parse(calling, pieces_of(f"{begun}{CALL}{ARGUMENTS}", cuts))
    assert found == ("Which < one?\n", "Hm.", [PARIS])


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = HarmonyParser(is_held=True, calls=True, in_pieces=True)
    assert parser.push("<|channel|>analysis<|message|>So <") == ("So ", "", [])
    assert parser.push("b><|end") == ("<b>", "", [])
    parser.push(f"|><|start|>assistant{CALL}")
    assert parser.push('{"a"') == ("", "", [ToolCall(0, "", '{"a"')])
    assert parser.push(": 1}", is_last=True) == ("", "", [ToolCall(0, "", ": 1}")])


def test_the_format_of_calls_alone_reads_them_too() -> None:
    """Where the reasoning stays in the text."""
    parser = ToolCallParser(HARMONY)
    text = f"{THOUGHT}<|start|>assistant{CALL}{{}}<|call|>"
    parts = [*map(parser.push, text), parser.flush()]
    assert [(c.name, c.arguments) for _, calls in parts for c in calls] == [("get_weather", "{}")]
    assert "".join(content for content, _ in parts) == f"{THOUGHT}<|start|>assistant"


# ---------------------------------------------------------------- constraints


@functools.cache
def facts() -> TokenizerFacts:
    """A vocabulary with the marks of the format; two of them end an answer."""
    tokenizer = byte_level_json()
    tokenizer.add_special_tokens([*MARKS])
    ends = tuple(tokenizer.token_to_id(mark) for mark in ("<|return|>", "<|call|>"))
    return TokenizerFacts.from_tokenizer(
        tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=ends
    )


def offered(tools: dict[str, Any] = TOOLS) -> list[tool_calls.Tool]:
    return [tool_calls.Tool.from_schema(name, schema, True, "p") for name, schema in tools.items()]


PLACE = '{"location": "Paris"}'
FREE = tool_calls.calls(offered(), HARMONY, required=False, most=None)
FORCED = tool_calls.calls(offered(), HARMONY, required=True, most=3)
ROW = f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "free", "forced"),
    [
        (f"{CALL}{PLACE}", True, True),
        (f"{ROW}{CALL}{PLACE}", True, True),
        (f"{ROW}<|channel|>final<|message|>Hello", True, False),
        ("<|channel|>final<|message|>", True, False),
        (f"{CALL}{PLACE[:-1]}", False, False),
        (f"{CALL}{{}}", False, False),
        (CALL.replace("weather", "waether") + PLACE, False, False),
        (f"{ROW}{CALL}{PLACE}<|start|>assistant{CALL}{PLACE}", False, False),
        (f"<|start|>assistant to=functions.get_weather{CALL}{PLACE}", False, False),
        (THOUGHT, False, False),
        ("Hello", False, False),
    ],
)
def test_a_constraint_takes_a_row_of_messages(text: str, free: bool, forced: bool) -> None:
    assert (takes(FREE, facts(), text), takes(FORCED, facts(), text)) == (free, forced)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_random_answers_are_read_as_they_were_meant(schema: dict[str, Any]) -> None:
    rng, num_calls, num_texts = random.Random(0), 0, 0
    tools = offered({"f_x": schema, "g": None})
    grammars = {}
    for required in (True, False):
        held = tool_calls.calls(tools, HARMONY, required=required, most=None)
        grammars[required] = compile_constraint(held, facts(), CompileOptions()).grammar
    for (required, grammar), _ in itertools.product(grammars.items(), range(8)):
        text = random_answer(load_grammar(grammar, facts()), rng)
        if text is None:
            continue
        parser = HarmonyParser(calls=True, in_pieces=True, is_held=True)
        _, content, calls = parse(parser, [*text])
        assert len(calls) == 1 if required else len(calls) <= 1
        num_texts += bool(content)
        for name, arguments in calls:
            wanted = {"f_x": {"type": "object"} | schema, "g": {"const": {}}}[name]
            jsonschema.validate(json.loads(arguments), wanted)
            num_calls += 1
    assert num_calls >= 4 and num_texts >= 1


UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
OF_A = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"]}


def test_values_that_a_grammar_does_not_cover_are_found_in_calls_and_content() -> None:
    content = JsonSchema(schema=json.dumps(OF_A))
    tools = offered({"f": OF_A})
    either = tool_calls.one_call_or_json(tools, HARMONY, content)
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": [1, 1]}'
    final = '<|channel|>final<|message|>{"a": [1, 1]}'
    for constraint, texts in (
        (either, (call, final)),
        (tool_calls.calls(tools, HARMONY, required=False, most=1), (call,)),
    ):
        checks = compile_constraint(constraint, facts(), CompileOptions()).checks
        assert isinstance(checks, CheckedTags)
        for text in texts:
            whole = f"{THOUGHT}<|start|>assistant{text}"
            assert takes(constraint, facts(), whole)
            tracker = TagTracker(checks)
            found = [span for c in whole for span in tracker.push(c)] + tracker.finish()
            assert [whole[span.start : span.end] for span in found] == ["[1, 1]"]
    tracker = TagTracker(checks)
    assert tracker.push(f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>[1, 1]") == []
    assert tracker.finish() == []
    assert not takes(either, facts(), ROW + final)  # the content is JSON alone


def test_a_call_is_always_told_from_json() -> None:
    assert HARMONY.is_told_from(AnyJson(object_only=False))
    assert isinstance(FREE, StructuralTag) and FREE.max_tags == 1
