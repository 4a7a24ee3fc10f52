"""The end of a JSON object, found while its text comes."""

import json

from hypothesis import given
from hypothesis import strategies as st

from radixrt.parsers.scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\{}[]é\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='k"}{'), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(alphabet='k"}{\\'), VALUES), st.text(alphabet='}{"] \\x'), st.data())
def test_it_finds_the_end_that_a_json_parser_finds(
    value: dict, rest: str, data: st.DataObject
) -> None:
    text = json.dumps(value) + rest
    _, expected = json.JSONDecoder().raw_decode(text)
    scanner, known = JsonScanner(), 0
    while known < len(text):
        piece = text[known : known + data.draw(st.integers(1, len(text) - known))]
        end = scanner.end(piece)
        if end is not None:
            break
        known += len(piece)
        assert known < expected
    assert end is not None and known + end == expected
