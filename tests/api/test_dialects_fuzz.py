"""Whatever JSON comes to the Responses, Messages and Ollama APIs, the answer is a result or a 4xx,
also within a stream."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.api.anthropic.translation import CountTokensRequest, MessagesRequest
from radixrt.api.ollama.translation import ChatRequest, GenerateRequest, ShowRequest
from radixrt.api.openai_responses.translation import ResponsesRequest
from tests.api.conftest import RunningServer
from tests.api.test_fuzz import bodies, many_bodies, messages, scalars, send, values

Strategy = st.SearchStrategy[Any]


def objects(types: list[str], required: dict[str, Strategy], optional: list[str]) -> Strategy:
    """Objects with a type, and some of the fields that any of the types has."""
    fields: dict[str, Strategy] = {name: values for name in optional}
    kinds = st.sampled_from(types) | values
    return st.fixed_dictionaries({"type": kinds} | required, optional=fields)


strings = st.sampled_from(["hi", "", "{}", '{"a": 1}', "<|im_end|>", "\x00"])
parts = objects(
    ["input_text", "output_text", "refusal", "reasoning_text", "summary_text", "input_image"],
    {"text": strings},
    ["refusal", "prompt_cache_breakpoint", "cache_control"],
)
items = objects(
    [
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "other",
    ],
    {
        "role": st.sampled_from(["user", "assistant", "system", "developer", "tool"]),
        "content": strings | st.lists(parts, max_size=2) | values,
        "name": strings,
        "arguments": strings,
        "input": strings | values,
        "call_id": strings,
        "output": strings | st.lists(parts, max_size=2),
        "summary": st.lists(parts, max_size=2) | values,
    },
    ["id", "status", "encrypted_content"],
)
blocks = objects(
    ["text", "tool_use", "tool_result", "thinking", "redacted_thinking", "document", "image"],
    {"text": strings, "thinking": strings, "id": strings, "tool_use_id": strings, "name": strings},
    ["input", "content", "source", "cache_control", "signature"],
)
turns = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": strings | st.lists(blocks, max_size=3) | values,
        }
    ),
    max_size=4,
)
schemas = st.sampled_from([{"type": "object"}, {"type": "object", "properties": {"a": {}}}])
tools = st.lists(
    objects(
        ["function", "custom", "web_search"],
        {"name": st.sampled_from(["f", "", "g h"]), "parameters": schemas, "input_schema": schemas},
        ["strict", "cache_control", "description", "function", "format"],
    ),
    max_size=2,
)
REQUESTS = {
    "/v1/responses": bodies(
        ResponsesRequest,
        {
            "input": strings | st.lists(items, max_size=4) | values,
            "tools": tools | st.none(),
            "max_output_tokens": st.just(3),
        },
    ),
    "/v1/messages": bodies(
        MessagesRequest, {"messages": turns, "max_tokens": st.just(3), "tools": tools | st.none()}
    ),
    "/v1/messages/count_tokens": bodies(CountTokensRequest, {"messages": turns | values}),
    "/api/chat": bodies(
        ChatRequest, {"messages": messages | values, "options": st.just({"num_predict": 3})}
    ),
    "/api/generate": bodies(
        GenerateRequest, {"prompt": strings | values, "options": st.just({"num_predict": 3})}
    ),
    "/api/show": bodies(ShowRequest, {"model": scalars}),
}


@pytest.mark.parametrize("path", REQUESTS)
@many_bodies
@given(data=st.data())
def test_no_body_brings_the_server_down(server: RunningServer, path: str, data: Any) -> None:
    response = send(server, path, data.draw(REQUESTS[path]))
    if response.status_code != 200:
        error = response.json()["error"]
        assert error if path.startswith("/api/") else error["message"]
    for failure in ("server_error", "api_error", "nternal"):
        assert failure not in response.text
