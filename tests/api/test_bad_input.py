"""Each kind of bad input gets a 4xx that says what to change, and harms nobody."""

import json
import logging
from typing import Any

import pytest

from radixrt.api import app as app_module
from radixrt.api.http import endpoints
from tests.api.conftest import RunningServer, StartServer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}


def post(server: RunningServer, path: str, body: object) -> tuple[int, dict[str, Any]]:
    with server.http as http:
        response = http.post(path, json=body)
    return response.status_code, response.json().get("error", {})


def post_raw(server: RunningServer, body: bytes) -> tuple[int, dict[str, Any]]:
    with server.http as http:
        response = http.post("/v1/completions", content=body)
    return response.status_code, response.json()["error"]


BAD_FIELDS = [
    ({"temperature": -1}, "temperature", "temperature"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "top_p"),
    ({"top_p": 1.5}, "top_p", "from 0.0 to 1.0"),
    ({"n": 0}, "n", "from 1 to 128"),
    ({"n": 1000}, "n", "from 1 to 128"),
    ({"n": True}, "n", "integer"),
    ({"max_tokens": -5}, "max_tokens", "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens", "integer"),
    ({"max_tokens": 100_000}, "max_tokens", "512"),
    ({"max_tokens": 10**30}, "max_tokens", "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty", "-2.0 to 2.0"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
    ({"repetition_penalty": 1e-308}, "repetition_penalty", "from 0.01 to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    ({"logit_bias": {"5": 1000}}, "logit_bias", "100"),
    ({"stop": ["a", 5]}, "stop[1]", "string"),
    ({"stop": ""}, "stop", "empty"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"stop": "x" * 2000}, "stop", "1024"),
    ({"stop_token_ids": [99999]}, "stop_token_ids", "99999"),
    ({"stop_token_ids": list(range(1025))}, "stop_token_ids", "1024"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "1 to 16384"),
    ({"allowed_token_ids": [5] * 16385}, "allowed_token_ids", "16385"),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids", "-1"),
    ({"allowed_token_ids": [5, 99999]}, "allowed_token_ids", "99999"),
    ({"bad_words": ["x"] * 257}, "bad_words", "256"),
    ({"bad_words": ["x", ""]}, "bad_words", "1 to 256"),
    ({"bad_words": ["x" * 257]}, "bad_words", "1 to 256"),
    ({"bad_words": [["x"]]}, "bad_words[0]", "string"),
    ({"max_tokens": 2**70}, "max_tokens", "from 1 to 2147483647"),
    ({"rid": ""}, "rid", "1 to 256"),
    ({"request_id": "a\nb"}, "rid", "printable"),
    ({"seed": 2**64}, "seed", "seed"),
    ({"timeout": -1}, "timeout", "above 0"),
    ({"timeout": 3601}, "timeout", "at most 3600 seconds (--max-timeout)"),
    ({"min_tokens": 10, "max_tokens": 5}, "min_tokens", "10"),
    ({"model": "gpt-9"}, "model", "gpt-9"),
    ({"stream_options": 7}, "stream_options", "object"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD_FIELDS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_bad_field_is_named(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    body = (CHAT if "chat" in path else COMPLETION) | fields
    status, error = post(server, path, body)
    assert status == (404 if "model" in fields else 400)
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ([], "empty"),
        ([[]], "empty"),
        ([5, "text"], "not mixed"),
        ([5.5], "5.5"),
        ([True], "True"),
        ([420], "420"),
        ([-1], "-1"),
        ([10**12], "vocabulary"),
        (["ok", ""], "empty"),
        (7, "string or array"),
        (None, "string or array"),
        ([3] * 512, "512"),
        ("the " * 5000, "512"),
    ],
)
def test_a_bad_prompt_is_explained(server: RunningServer, prompt: object, words: str) -> None:
    status, error = post(server, "/v1/completions", {"prompt": prompt})
    assert status == 400
    assert words in error["message"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"content": "hi"}], "messages[0].role is missing"),
        ([{"role": "wizard", "content": "hi"}], "wizard"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "data URL",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ("hi", "messages"),
    ],
)
def test_bad_messages_are_explained(server: RunningServer, messages: object, words: str) -> None:
    status, error = post(server, "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert words in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f"}]},
        {"chat_template": "{{ 1 }}"},
        {"truncate_prompt_tokens": 5},
        {"thinking_token_budget": 0},
        {"length_penalty": 0.5},
        {"use_beam_search": True},
        {"documents": [{"text": "x"}]},
    ],
)
def test_what_would_have_to_be_ignored_is_refused(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    status, error = post(server, "/v1/chat/completions", CHAT | fields)
    assert status == 400
    assert error["param"] == next(iter(fields)) and error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("depth", [50, 300, 490])
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs"])
def test_deep_nesting_is_refused_and_brings_nothing_down(
    server: RunningServer, field: str, depth: int
) -> None:
    value = '{"a": [' * depth + "]}" * depth
    value = f"[{value}]" if field == "tools" else value
    messages = json.dumps(CHAT["messages"])
    with server.http as http:
        body = f'{{"messages": {messages}, "{field}": {value}}}'
        response = http.post("/v1/chat/completions", content=body)
    status, error = response.status_code, response.json()["error"]
    assert status == 400 and "64 deep" in error["message"]
    assert post(server, "/v1/chat/completions", CHAT)[0] == 200


def test_a_refused_field_whose_value_asks_for_nothing_is_fine(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {
        "response_format": {"type": "text"},
        "length_penalty": 1.0,
        "bad_words": [],
        "use_beam_search": False,
    }
    with caplog.at_level(logging.WARNING, "radixrt.api.http.endpoints"):
        assert post(server, "/v1/chat/completions", CHAT | fields)[0] == 200
    assert caplog.records == []


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [TOOL, {"type": "function", "function": None}]}, "tools[1].function"),
        ({"tools": [{"function": {"name": 5}}]}, "tools[0].function.name"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_no_template_can_take_is_named(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    status, error = post(server, "/v1/chat/completions", CHAT | fields)
    assert (status, error["param"]) == (400, param)


def test_a_stop_token_given_often_counts_once(server: RunningServer) -> None:
    assert post(server, "/v1/completions", COMPLETION | {"stop_token_ids": [60] * 5000})[0] == 200
    assert server.scheduler.requests[-1].sampling.stop_token_ids == (60,)


def test_a_text_far_too_long_is_told_a_lower_bound_of_its_tokens(server: RunningServer) -> None:
    _, error = post(server, "/v1/completions", {"prompt": "the " * 50_000})
    assert "at least" in error["message"]


CALL = {"id": "a", "name": "f", "call_id": "a"}
BIG = {"a": 2**70}


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/responses", {"input": [{"type": [], "role": "user", "content": "hi"}]}, "input[0].type"),
        ("/v1/responses", {"input": "hi", "metadata": BIG}, "64-bit"),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "web_search", **BIG}], "stream": True}, "64-bit"),
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}] * 10_001}, "input has 10001"),
        ("/v1/messages", {**CHAT, "max_tokens": 1, "tool_choice": {"type": {}}}, "tool_choice.type"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", **CALL, "input": BIG}]}]}, "64-bit"),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 10_001}]}, "messages has 10001"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}] * 10_001}]}, "messages has 10001"),
        ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": BIG}}]}]}, "64-bit"),
        ("/api/chat", {**CHAT, "think": "a" * 1025}, "reasoning_effort"),
    ],
)  # fmt: skip
def test_limits_and_types_hold_in_other_apis_forms(
    server: RunningServer, path: str, body: dict[str, Any], words: str
) -> None:
    with server.http as http:
        response = http.post(path, json=body)
    assert response.status_code == 400 and words in response.text, response.text


def test_types_of_tools_in_the_log_are_few_and_short(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [{"type": f"{number} " + "x" * 1000} for number in range(300)]
    with server.http as http, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert http.post("/v1/messages/count_tokens", json={**CHAT, "tools": tools}).is_success
    lines = [r.getMessage() for r in caplog.records if "Skipped tools" in r.getMessage()]
    assert 0 < len(lines) <= 100 and max(map(len, lines)) < 200


def test_a_missing_field_is_named(server: RunningServer) -> None:
    status, error = post(server, "/v1/completions", {"max_tokens": 1})
    assert (status, error["message"]) == (400, "prompt is missing.")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"prompt": "hi",}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": Infinity}',
        b"[1]",
        b'"hi"',
        b"[" * 40_000,
    ],
)
def test_what_is_not_json_is_refused(server: RunningServer, body: bytes) -> None:
    status, error = post_raw(server, body)
    assert status == 400
    assert "JSON" in error["message"]


def test_a_number_beyond_all_bounds_is_refused(server: RunningServer) -> None:
    assert post_raw(server, b'{"prompt": "hi", "temperature": 1e999}')[0] == 400


def test_a_large_body_is_refused(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 2048)
    server = start_server()
    large = json.dumps({"prompt": "x" * 5000}).encode()
    status, error = post_raw(server, large)
    assert status == 413 and "2048" in error["message"]
    with server.http as http:  # in chunks, its size not declared
        pieces = (large[i : i + 500] for i in range(0, len(large), 500))
        assert http.post("/v1/completions", content=pieces).status_code == 413
    server.answer_with("Hello")
    assert post(server, "/v1/completions", COMPLETION)[0] == 200


def test_unknown_fields_are_accepted_and_warned_of_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "radixrt.api.http.endpoints"):
        for _ in range(3):
            status, _ = post(
                server, "/v1/completions", COMPLETION | {"sparkle": 1, "n_predict": 1, "user": "me"}
            )
            assert status == 200
    assert [r.getMessage() for r in caplog.records].count(
        "Ignored unknown request fields (each is named once): 'n_predict' (here max_tokens), 'sparkle'."
    ) == 1
    assert "user" not in caplog.text


def test_many_unknown_fields_cost_one_line_and_little_memory(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {f"{number}-{'x' * 5000}": 1 for number in range(3000)}
    with caplog.at_level(logging.WARNING, "radixrt.api.http.endpoints"):
        for _ in range(2):
            assert post(server, "/v1/completions", COMPLETION | fields)[0] == 200
    (record,) = caplog.records
    assert len(record.getMessage()) < 2000
    assert sum(map(len, endpoints._warned)) <= 100_000
    endpoints._warned.clear()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/other", 404)],
)
def test_wrong_addresses_get_openai_errors(
    server: RunningServer, method: str, path: str, status: int
) -> None:
    with server.http as http:
        response = http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_one_bad_prompt_of_several_fails_the_request_and_aborts_the_others(
    server: RunningServer,
) -> None:
    server.answer_endlessly()
    body = {"prompt": ["good", "the " * 600, "good"], "max_tokens": 400}
    status, error = post(server, "/v1/completions", body)
    assert status == 400 and "512" in error["message"]


def test_more_answers_than_the_queue_holds_are_refused_at_once(start_server: StartServer) -> None:
    server = start_server(max_queued_requests=10)
    status, error = post(server, "/v1/completions", {"prompt": ["a"] * 4, "n": 3})
    assert status == 400 and "12 answers" in error["message"]
