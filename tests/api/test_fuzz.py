"""Whatever JSON comes, the answer is a result or a 4xx with OpenAI's error object, and the server
lives."""

import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt.api.native.cache import PinRequest, ReleaseRequest, WarmRequest
from radixrt.api.native.generate import NativeRequest, NativeSampling
from radixrt.api.native.infill import InfillRequest
from radixrt.api.native.prompt_calls import (
    CompileRequest,
    Detokenize,
    ScoreRequest,
    TokenizeRequest,
)
from radixrt.api.requests.protocol import ChatCompletionRequest, CompletionRequest, KeepRequest
from tests.api.conftest import RunningServer

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 500),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**40]),
    st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.sampled_from(["", "hi", "user", "text", "auto", "<|im_end|>", "\x00", "\ue000", "é🦊"]),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
names = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "name",
        "function",
        "arguments",
        "tool_calls",
        "5",
        "n",
        "stop",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=6,
)
tool_calls = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "custom"])},
        optional={
            name: st.fixed_dictionaries(
                {"name": st.just("f"), "arguments": values, "input": values}
            )
            for name in ("function", "custom")
        },
    ),
    max_size=1,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": values},
        optional={
            "tool_calls": values | tool_calls,
            "name": values,
            "reasoning_content": values,
            "cache_control": values | st.just({"type": "ephemeral"}),
        },
    ),
    max_size=3,
)


def bodies(struct: Any, always: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    optional = {name: values for name in struct.__struct_fields__ if name not in always}
    few = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
    return few.flatmap(
        lambda chosen: st.fixed_dictionaries(always | {name: optional[name] for name in chosen})
    )


native_sampling = bodies(NativeSampling, {"max_new_tokens": st.integers(1, 5)})
texts = st.lists(st.sampled_from(["a", " b", "cat", ""]), max_size=3)
token_ids = st.lists(st.integers(-1, 421), max_size=4)
REQUESTS = {
    "/v1/completions": bodies(
        CompletionRequest, {"prompt": values | token_ids | st.just("hi"), "max_tokens": st.just(3)}
    ),
    "/v1/chat/completions": bodies(
        ChatCompletionRequest, {"messages": messages | values, "max_tokens": st.just(3)}
    ),
    "/generate": bodies(
        NativeRequest, {"text": st.just("hi") | values, "sampling_params": native_sampling | values}
    ),
    "/infill": bodies(
        InfillRequest, {"input_prefix": values | st.just("hi"), "n_predict": st.just(3)}
    ),
    "/v1/grammar/compile": bodies(CompileRequest, {}),
    "/tokenize": bodies(TokenizeRequest, {"prompt": values})
    | bodies(TokenizeRequest, {"messages": messages}),
    "/detokenize": bodies(Detokenize, {"tokens": values | token_ids}),
    "/v1/cache/warm": bodies(WarmRequest, {"prompt": st.just("hi")})
    | bodies(WarmRequest, {"messages": messages})
    | bodies(WarmRequest, {}),
    "/v1/cache/pin": bodies(PinRequest, {"token_ids": token_ids}),
    "/v1/cache/release": bodies(ReleaseRequest, {}),
    "/v1/conversations": bodies(KeepRequest, {"prompt": values | st.just("hi")})
    | bodies(KeepRequest, {"messages": messages}),
    "/score_choices": bodies(ScoreRequest, {"prompt": st.just("hi"), "choices": values | texts})
    | bodies(ScoreRequest, {"messages": messages, "choices": texts}),
    "/abort_request": st.fixed_dictionaries({"rid": values}),
}


client = httpx.Client(timeout=10)

EXAMPLES = 400 if "RADIXRT_TORTURE" in os.environ else 40
"""Bodies of each route; ``make torture`` tries more."""
many_bodies = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def send(server: RunningServer, path: str, body: Any) -> httpx.Response:
    """The response to a body, which must be a result or a refusal."""
    response = client.post(f"{server.url}{path}", json=body)
    assert response.status_code in (200, 400, 404), (body, response.text)
    return response


@pytest.mark.parametrize("path", REQUESTS)
@many_bodies
@given(data=st.data())
def test_no_body_brings_the_server_down(server: RunningServer, path: str, data: Any) -> None:
    response = send(server, path, data.draw(REQUESTS[path]))
    if response.status_code != 200:
        assert response.json()["error"]["message"]
