"""Tool calls in the text of an answer, however it is cut into pieces."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from radixrt.messages import ToolCall
from radixrt.tokenizer.tool_calls import ToolCallParser

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Málaga"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time"}</tool_call>'


def parse(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser()
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
