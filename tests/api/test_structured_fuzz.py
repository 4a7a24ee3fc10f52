"""Whatever constraint or tool comes, it is compiled or refused, and the server lives."""

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt.api.requests.protocol import ConstraintFields
from tests.api.conftest import RunningServer
from tests.api.test_fuzz import EXAMPLES

words = st.sampled_from(
    ["type", "name", "schema", "json_schema", "strict", "format", "structures", "triggers", "tags", "begin", "content", "end", "pattern", "value", "grammar", "json", "regex", "choice", "json_object", "structural_tag", "tag", "triggered_tags", "tags_with_separator", "any_text", "const_string", "function", "object", "string", "integer", "array", "separator", "at_least_one", "properties", "items", "enum", "const", "required", "minimum", "maxLength", "anyOf", "oneOf", "not", "$ref", "$defs", "additionalProperties", "uniqueItems", "#", "(", "a+", "[", '{"type":"object"}', "{}", "root"]
)  # fmt: skip
numbers = st.integers(-2, 40) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | words | st.sampled_from(["", "é🦊", 2**70])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries({"name": words, "parameters": values}, optional={"strict": st.booleans()})}),
    max_size=3,
)  # fmt: skip
choices = (
    st.sampled_from(["auto", "none", "required", {"type": "function", "function": {"name": "a+"}}])
    | values
)
fields = st.sampled_from(ConstraintFields.__struct_fields__)
constraints = st.dictionaries(fields, values, max_size=2)
client = httpx.Client(timeout=20)


@pytest.mark.parametrize("path", ["/v1/grammar/compile", "/v1/chat/completions"])
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_constraint_brings_the_server_down(
    server: RunningServer, path: str, data: st.DataObject
) -> None:
    body: dict[str, Any] = data.draw(constraints)
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        body |= data.draw(st.fixed_dictionaries({}, optional={"tools": tools, "tool_choice": choices}))  # fmt: skip
    response = client.post(f"{server.url}{path}", json=body)
    assert response.status_code in (200, 400), (body, response.text)
    if response.status_code == 400:
        assert response.json()["error"]["message"]


def test_long_integers_keep_their_digits_or_are_refused(server: RunningServer) -> None:
    digits = "12345678901234567890123"
    for body in (
        f'{{"guided_json": {{"const": {digits}}}}}',
        f'{{"guided_json": {{"type": "integer", "minimum": {digits}}}}}',
        f'{{"guided_json": {{"const": {"1" * 5000}}}}}',
    ):
        response = client.post(f"{server.url}/v1/grammar/compile", content=body)
        assert response.status_code == 400
    tool = (
        f'{{"type": "function", "function": {{"name": "f", "parameters": {{"const": {digits}}}}}}}'
    )
    chat = f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": [{tool}]}}'
    response = client.post(f"{server.url}/v1/chat/completions", content=chat)
    assert response.status_code == 400, response.text
