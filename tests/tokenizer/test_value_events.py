"""The events of a JSON text's values, against the text parsed as a whole."""

import json
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.constrained.constraint import JsonSchema, Regex, StructuralTag, Tag
from radixrt.messages.answers import ValueEvent
from radixrt.messages.message import ToolCall
from radixrt.messages.requests import GenerateRequest, TextPrompt
from radixrt.tokenizer.answer.value_events import AnswerValues, ValueTracker

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=8)
NAMES = st.text(max_size=5) | st.sampled_from(["a/b", "~1", 'q"', "\\", "é", ""])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}


def parts(value: Any, pointer: str = "") -> dict[str, Any]:
    """Every value in a value, by its JSON pointer."""
    found = {pointer: value}
    items = enumerate(value) if isinstance(value, list) else []
    items = value.items() if isinstance(value, dict) else items
    for key, inner in items:
        step = str(key).replace("~", "~0").replace("/", "~1")
        found |= parts(inner, f"{pointer}/{step}")
    return found


@settings(max_examples=40, deadline=None)
@given(value=VALUES, data=st.data(), indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_every_value_is_told_once_and_in_time(
    value: Any, data: st.DataObject, indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    tracker = ValueTracker()
    told: list[tuple[int, ValueEvent]] = []
    for number, piece in enumerate(pieces):
        told += [(number, event) for event in tracker.push(piece)]
    told += [(len(pieces), event) for event in tracker.finish()]
    expected = parts(value)
    completed = {e.pointer: e for _, e in told if e.event == "completed"}
    assert [e.event for _, e in told].count("completed") == len(expected)
    assert completed.keys() == expected.keys()
    started = [e.pointer for _, e in told if e.event == "started"]
    assert sorted(started) == sorted(
        pointer for pointer, part in expected.items() if isinstance(part, dict | list | str)
    )
    for pointer, part in expected.items():
        assert completed[pointer].text is not None
        assert json.loads(completed[pointer].text) == part
        assert completed[pointer].type == TYPES.get(type(part), "number")
    so_far = ""
    for number, piece in enumerate(pieces):
        so_far += piece
        for when, event in told:
            assert event.text is None or when != number or event.text in so_far
            closes = event.text is not None and event.text[-1] in '}]"'
            if when == number and closes:  # it ends in this very piece
                assert so_far.rindex(event.text) + len(event.text) > len(so_far) - len(piece)


def request(constraint: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="a", prompt=TextPrompt("a"), constraint=constraint, stream_values=True
    )


def test_only_json_has_values() -> None:
    values = AnswerValues(request(Regex(pattern='"a"')), validated=True)
    assert values.push('"a"', [], is_last=True) == []


def test_values_of_unenforced_schemas_and_tools_are_not_validated() -> None:
    for strict in (True, False):
        schema = JsonSchema(schema="{}", strict=strict)
        (event,) = AnswerValues(request(schema), validated=strict).push("1", [], is_last=True)
        assert (event.text, event.validated) == ("1", strict)
        tags = StructuralTag(tags=(Tag(begin="<", content=schema, end=">"),), triggers=("<",))
        values = AnswerValues(request(tags), validated=True)
        (event,) = values.push("free [text", [ToolCall(1, "f", "{}")], is_last=True)[1:]
        assert (event.text, event.validated, event.tool_call) == ("{}", strict, 1)


def test_a_long_text_costs_as_much_a_piece_as_a_short_one() -> None:
    """Deep inside a long array of strings, a hundred thousand pieces take seconds if each looks at
    the whole text."""
    tracker = ValueTracker()
    tracker.push('{"a": [')
    begin = time.process_time()
    for _ in range(100_000):
        tracker.push('"b", ')
    assert time.process_time() - begin < 10
