"""Values inside of tags are found wherever the tags are, however the text is cut."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.base.errors import RequestError
from radixrt.constrained.compiler.compilation import compile_constraint
from radixrt.constrained.compiler.jobs import CompileOptions
from radixrt.constrained.constraint import AnyText, JsonSchema, Regex, StructuralTag, Tag
from radixrt.constrained.grammar import CheckedTag, CheckedTags, Checks, SpanCheck
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.tool_calls import Tool, calls
from radixrt.parsers.tool_calls.json_calls import JsonCalls
from radixrt.parsers.tool_calls.registry import FORMATS
from radixrt.tokenizer.retry.tags import TagTracker
from tests.constrained.vocabularies import facts_of

CHECK = SpanCheck(path=("a",), schema=True, pointer="/a", keywords=("not",))
WHOLE = SpanCheck(path=(), schema=True, pointer="", keywords=("not",))
CALL = CheckedTag(begin="<call>f(", end=")</call>", is_json=True, checks=(CHECK,))
OTHER = CheckedTag(begin="<call>g(", end=")", is_json=True, checks=(WHOLE,))
TEXT = CheckedTag(begin="<text>", end="</text>", is_json=False, checks=())
TAGS = (CALL, OTHER, TEXT)
FREE = CheckedTags(tags=TAGS, triggers=("<call>", "<text>"), free_text=True, separator="")
ALONE = CheckedTags(tags=TAGS, triggers=("<call>", "<text>"), free_text=False, separator="<;")
LISTS = (("calls [", "] end"), ("<calls>[", "]</calls>"))
LISTED = CheckedTags(tags=(CALL, OTHER), triggers=(), free_text=True, separator=", ", lists=LISTS)
EITHER = CheckedTags(
    tags=(CALL, CheckedTag(begin="", end="", is_json=True, checks=(WHOLE,))),
    triggers=("<call>",),
    free_text=False,
    separator="",
)

VALUES = st.sampled_from([1, -2.5, "x<call>f(", ")</call>", None, [1, {"a": 2}], {"a": "\\\""}, {"b": {"a": 3}}, {"a": [], "b": 0}])  # fmt: skip


def written(pieces: list[tuple[str, Any]], tags: CheckedTags) -> tuple[str, list[tuple[str, str]]]:
    """A text, and each checked value in it: the pointer of its check and its text."""
    text, found = "", []
    for number, (kind, value) in enumerate(pieces):
        if tags.free_text:
            text += "free <cal or <tex)"
        elif number:
            text += tags.separator
        content = json.dumps(value)
        if kind == "text":
            text += f"<text>{content.replace('</text>', '')} <call>f(1)</text>"
            continue
        tag = CALL if kind == "f" else OTHER
        text += tag.begin + content + tag.end
        if kind == "g":
            found.append(("", content))
        elif isinstance(value, dict) and "a" in value:
            found.append(("/a", json.dumps(value["a"])))
    return text + ("the end <" if tags.free_text else ""), found


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.sampled_from(["f", "g", "text"]), VALUES), max_size=5),
    tags=st.sampled_from([FREE, ALONE]),
    cuts=st.data(),
)
def test_values_are_found_in_whatever_pieces_the_text_comes(
    pieces: list[tuple[str, Any]], tags: CheckedTags, cuts: st.DataObject
) -> None:
    text, expected = written(pieces, tags)
    tracker, found, at = TagTracker(tags), [], 0
    while at < len(text):
        size = cuts.draw(st.integers(1, 12))
        checkpoint = tracker.checkpoint()
        tracker.push(cuts.draw(st.sampled_from([text[at : at + size], text[at : at + 20]])))
        tracker.reset(checkpoint)
        found += tracker.push(text[at : at + size])
        at += size
        assert tracker.offset == min(at, len(text))
    found += tracker.finish()
    assert [(span.check.pointer, text[span.start : span.end]) for span in found] == expected


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize(("opening", "closing"), LISTS)
@pytest.mark.parametrize("free_text", [True, False])
def test_values_are_found_in_a_list_of_calls(
    size: int, opening: str, closing: str, free_text: bool
) -> None:
    tracker = TagTracker(msgspec.structs.replace(LISTED, free_text=free_text))
    text = "some <calls> [<call>f( calls" if free_text else ""
    text += f'{opening}<call>f({{"a": 1}})</call>, <call>g("], <call>f("){closing}'
    found = []
    for at in range(0, len(text), size):
        tracker.reset(tracker.checkpoint())
        found += tracker.push(text[at : at + size])
    found += tracker.finish()
    assert [text[span.start : span.end] for span in found] == ["1", '"], <call>f("']


def test_a_value_is_open_from_its_beginning_on() -> None:
    tracker = TagTracker(FREE)
    before = 'text <call>f({"b": 1, "a": '
    tracker.push(before)
    assert tracker.open_since is None
    tracker.push("[1")
    assert tracker.open_since == len(before)
    tracker.push("]")
    assert tracker.open_since is None


@pytest.mark.parametrize("text", ['{"x": 1}', "5", "[1, 2]", '"<call>"'])
def test_a_tag_without_beginning_is_told_by_its_first_character(text: str) -> None:
    tracker = TagTracker(EITHER)
    spans = [span for character in text for span in tracker.push(character)] + tracker.finish()
    assert [(span.check, span.start, span.end) for span in spans] == [(WHOLE, 0, len(text))]
    tracker = TagTracker(EITHER)
    assert [span.check for span in tracker.push('<call>f({"a": 1})</call>')] == [CHECK]


@pytest.mark.parametrize("text", ["<call>f({", '<call>f({"a": 1}', "<call>f({})</call", "<text>x"])
def test_a_text_that_ends_inside_of_a_tag_is_an_error(text: str) -> None:
    tracker = TagTracker(ALONE)
    tracker.push(text)
    with pytest.raises(ValueError, match="ends"):
        tracker.finish()


# ---------------------------------------------------------------- which constraints have checks

UNIQUE = JsonSchema(schema='{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}')


def checks_of(*tags: Tag, triggers: tuple[str, ...] = ("<",)) -> Checks:
    constraint = StructuralTag(tags=tags, triggers=triggers)
    return compile_constraint(constraint, facts_of("byte_level_json"), CompileOptions()).checks


def test_strict_contents_are_checked_and_others_are_not() -> None:
    loose = JsonSchema(schema=UNIQUE.schema, strict=False)
    checks = checks_of(
        Tag(begin="<a>", content=UNIQUE, end="</a>"),
        Tag(begin="<b>", content=loose, end="</b>"),
        Tag(begin="<c>", content=AnyText(), end="</c>"),
    )
    assert isinstance(checks, CheckedTags)
    assert [(tag.is_json, len(tag.checks)) for tag in checks.tags] == [
        (True, 1),
        (True, 0),
        (False, 0),
    ]
    (check,) = checks.tags[0].checks
    assert (check.path, check.keywords, check.tag) == ((), ("uniqueItems",), "<a>")
    assert checks_of(Tag(begin="<b>", content=loose, end="</b>")) == ()


@pytest.mark.parametrize(
    "tags",
    [
        (Tag(begin="<a>", content=UNIQUE, end="</a>"), Tag(begin="<b>", content=Regex(pattern=".*"), end="</b>")),
        (Tag(begin="<a>", content=UNIQUE, end="</a>"), Tag(begin="<a>", content=AnyText(), end="</a>")),
        (Tag(begin="<a>", content=UNIQUE, end="0</a>"),),
    ],
)  # fmt: skip
def test_where_a_value_can_not_be_found_for_sure_its_check_is_refused(
    tags: tuple[Tag, ...],
) -> None:
    with pytest.raises(RequestError, match=r"'<a>': .*'uniqueItems'.*can't be found") as caught:
        checks_of(*tags)
    assert caught.value.code == "grammar"


@pytest.mark.parametrize("name", ["mistral_v3", "phi4_mini"])
@pytest.mark.parametrize("required", [True, False])
def test_arguments_in_a_list_of_calls_are_checked(name: str, required: bool) -> None:
    facts, written = facts_of("byte_level_json"), FORMATS[name]
    assert isinstance(written, JsonCalls)
    schema = json.dumps({"type": "object", "properties": {"a": json.loads(UNIQUE.schema)}})
    tools = [Tool(name, JsonSchema(schema=schema)) for name in ("f", "g")]
    constraint = calls(tools, written, required=required, most=None)
    compiled = compile_constraint(constraint, facts, CompileOptions())
    assert isinstance(compiled.checks, CheckedTags)
    for opening, closing in written.lists:
        texts = [f'{written.begin(tool)}{{"a": [1, 1]}}{written.end}' for tool in ("f", "g")]
        text = opening + written.separator.join(texts) + closing
        token_ids = [*facts.encode(text), facts.eos_token_ids[0]]
        assert load_grammar(compiled.grammar, facts).advance(token_ids) == len(token_ids)
        tracker = TagTracker(compiled.checks)
        found = [span for character in text for span in tracker.push(character)] + tracker.finish()
        assert [text[span.start : span.end] for span in found] == ["[1, 1]"] * 2
