"""The size of JSON bodies is known before they are parsed."""

import asyncio
import json
import threading
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.api.http import json_bounds
from radixrt.api.http.json_bounds import _BLOCK, LIMIT, MAX_OTHER_VALUES, JsonBounds, count
from radixrt.api.http.json_size import JsonSize, exact_size, upper_bound
from radixrt.base.errors import RequestError

json_values = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(["[{,", '"', "\\", "\\\\"]),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def containers_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return isinstance(value, dict | list) + sum(map(containers_of, inner))


def values_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(values_of, inner))


@given(value=json_values, ascii_only=st.booleans())
def test_counts_are_those_of_the_parsed_value(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    exact, bound = exact_size(text), upper_bound(text)
    assert upper_bound(text, partial(count, text)) == bound
    assert exact.containers == containers_of(value)
    assert exact.members == members_of(value)
    assert values_of(value) <= exact.values <= values_of(value) + exact.containers
    assert not exact.exceeds(bound)


def test_characters_of_all_blocks_are_counted() -> None:
    text = b"[" + b"a" * (2 * _BLOCK) + b"[[" + b"," * _BLOCK
    assert (count(text, b"["), count(text, b","), count(b"", b"[")) == (3, _BLOCK, 0)


def members_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return isinstance(value, dict) * len(inner) + sum(map(members_of, inner))


def check(text: bytes) -> None:
    asyncio.run(JsonBounds().check(text))


def test_brackets_in_strings_do_not_count() -> None:
    check(json.dumps({"prompt": '[{"quoted": [1, 2]},]' * LIMIT.containers}).encode())


@pytest.mark.parametrize("piece", [b"[],", b"{},", b'"",', b'"\\"[",[],'])
def test_too_many_values_are_refused(piece: bytes) -> None:
    text = b'{"prompt": [' + piece * (LIMIT.values + 1) + b"0]}"
    with pytest.raises(RequestError, match="arrays and objects") as refused:
        check(text)
    assert refused.value.status == 413


def test_too_many_keys_are_refused() -> None:
    with pytest.raises(
        RequestError, match=f"at most {LIMIT.containers}, {LIMIT.members} and"
    ) as refused:
        check(b"{" + b'"":0,' * (LIMIT.members + 1) + b'"prompt": "a"}')
    assert refused.value.status == 413


def test_lists_of_token_ids_may_be_longer_than_all_the_rest() -> None:
    ids = b"[" + b"1," * (MAX_OTHER_VALUES + 1) + b"0]"
    check(b'{"prompt": ' + ids + b', "stop_token_ids": [1]}')
    with pytest.raises(RequestError, match="Beside input_ids, prompt") as refused:
        check(b'{"prompt": [1], "stop_token_ids": ' + ids + b"}")
    assert refused.value.status == 413


def test_a_long_list_of_token_ids_passes() -> None:
    check(b'{"prompt": [' + b"123456," * (LIMIT.values - 10) + b"0]}")


@pytest.mark.parametrize("end", [b"", b"\\", b'\\"', b"\\\\"])
def test_a_string_that_does_not_end_ends_the_count(end: bytes) -> None:
    """Its parser refuses the body there, and counts nothing in it either."""
    many = b"[" * (LIMIT.containers + 1)
    check(b'{"prompt": "' + many + end)
    with pytest.raises(ValueError):
        msgspec.json.decode(b'{"prompt": "' + many + end)
    assert exact_size(b'[{"a": "[,' + end) == (2, 1, 3)
    with pytest.raises(RequestError):
        check(b'{"prompt": ' + many + b'"' + end)


def test_quotes_in_a_string_that_does_not_end_are_read_once() -> None:
    """When each was tried anew, this text would have taken a day."""
    assert exact_size(b'["' + b'\\"' * (1 << 22)) == (1, 0, 2)


def test_a_count_that_takes_too_long_refuses_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bound that is known: counting again would hold the event loop."""
    monkeypatch.setattr(json_bounds, "COUNT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(json_bounds, "upper_bound", bound_in_thread)
    with pytest.raises(RequestError, match="arrays and objects"):
        check(json.dumps("[" * (LIMIT.containers + 1)).encode())


def bound_in_thread(text: bytes, *count: Any) -> JsonSize:
    assert threading.current_thread() is not threading.main_thread()
    return upper_bound(text, *count)
