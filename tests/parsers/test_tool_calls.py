"""Tool calls in the text of an answer, however it is cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.messages.message import ToolCall
from radixrt.parsers.tool_calls.json_calls import JsonCalls
from radixrt.parsers.tool_calls.parser import ToolCallParser
from radixrt.parsers.tool_calls.registry import FORMATS

HERMES = FORMATS["hermes"]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Málaga"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time"}</tool_call>'


def parse(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(HERMES)
    parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(c for c, _ in parts), [call for _, calls in parts for call in calls]


def test_calls_are_taken_out_of_the_content() -> None:
    content, calls = parse([f"Let me see.\n{WEATHER}\n{TIME}"])
    assert content == "Let me see.\n"
    assert [(c.index, c.name) for c in calls] == [(0, "weather"), (1, "time")]
    assert json.loads(calls[0].arguments) == {"city": "Málaga"}
    assert calls[1].arguments == "{}"


@given(st.lists(st.integers(0, 300)))
def test_the_pieces_do_not_matter(cuts: list[int]) -> None:
    text = f"a < b <tool {WEATHER} and {TIME}<tool_call>oops</tool_call> end <tool_"
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    content, calls = parse(pieces)
    assert content == "a < b <tool  and <tool_call>oops</tool_call> end <tool_"
    assert [c.name for c in calls] == ["weather", "time"]


def test_a_call_that_is_not_closed_counts_if_it_is_complete() -> None:
    assert parse([WEATHER.removesuffix("</tool_call>")])[1][0].name == "weather"


def test_what_is_no_call_stays_content() -> None:
    for text in ("<tool_call>{", "<tool_call>[1]</tool_call>", '<tool_call>{"a": 1}</tool_call>'):
        assert parse([text]) == (text, [])


def test_json_that_could_not_be_passed_on_stays_content() -> None:
    for arguments in ('{"a": "\\ud83d"}', '{"a": 1e999}', '{"a": NaN}', "[" * 1500):
        text = '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>"
        assert parse([text]) == (text, [])


TRICKY = {
    "text": '</tool_call> <tool_call> {"name": "no"} \\ " }',
    "deep": {"list": [1, {"a": "]"}]},
}
JSON_FORMATS = [name for name, syntax in FORMATS.items() if isinstance(syntax, JsonCalls)]
NAMES = ["weather", 'we"ird', "Málaga"]


def written(name: str, arguments: object, form: str) -> str:
    """A call as the constraint lets it be written."""
    syntax = FORMATS[form]
    assert isinstance(syntax, JsonCalls)
    return syntax.begin(name) + json.dumps(arguments) + syntax.end


def join(pieces: list[ToolCall]) -> list[ToolCall]:
    calls: dict[int, ToolCall] = {}
    for piece in pieces:
        if piece.index in calls:
            assert not piece.name and piece.arguments
            known = calls[piece.index]
            piece = ToolCall(piece.index, known.name, known.arguments + piece.arguments)
        calls[piece.index] = piece
    return list(calls.values())


@pytest.mark.parametrize("form", JSON_FORMATS)
@pytest.mark.parametrize("in_pieces", [False, True])
@given(cuts=st.lists(st.integers(0, 600)), free=st.booleans())
def test_what_a_constraint_lets_through_is_read_as_it_was_meant(
    form: str, in_pieces: bool, cuts: list[int], free: bool
) -> None:
    separator = FORMATS[form].separator
    opening, closing = FORMATS[form].lists[0] if FORMATS[form].lists else ("", "")
    calls = opening + separator.join(written(name, TRICKY, form) for name in NAMES) + closing
    text = f"I will call. {calls}" if free else calls
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    parser = ToolCallParser(FORMATS[form], in_pieces=in_pieces, calls_alone=not free)
    parts = [*(parser.push(text[a:b]) for a, b in itertools.pairwise(borders)), parser.flush()]
    assert "".join(content for content, _ in parts) == ("I will call. " if free else "")
    known = join([call for _, calls in parts for call in calls])
    assert [(c.index, c.name) for c in known] == list(enumerate(NAMES))
    assert [json.loads(c.arguments) for c in known] == [TRICKY] * 3


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    parser = ToolCallParser(HERMES, in_pieces=True)
    _, none = parser.push('<tool_call>\n{"name": "f", "arg')
    _, first = parser.push('uments": {"a"')
    _, more = parser.push(": [1, ")
    _, last = parser.push("2]}}\n</tool")
    assert (none, first) == ([], [ToolCall(0, "f", '{"a"')])
    assert (more, last) == ([ToolCall(0, "", ": [1, ")], [ToolCall(0, "", "2]}")])
    assert parser.push("_call>") == ("", [])


def test_an_answer_of_json_that_mentions_a_call_makes_none() -> None:
    text = json.dumps({"a": written("f", {}, "hermes")})
    parser = ToolCallParser(HERMES, calls_alone=True)
    parts = [*(parser.push(character) for character in text), parser.flush()]
    assert "".join(content for content, _ in parts) == text
    assert not any(calls for _, calls in parts)


def test_a_call_cut_off_gives_out_what_it_has() -> None:
    parser = ToolCallParser(HERMES, in_pieces=True)
    _, calls = parser.push('<tool_call>\n{"name": "f", "arguments": {"a')
    assert calls == [ToolCall(0, "f", '{"a')]
    assert parser.flush() == ("", [])
