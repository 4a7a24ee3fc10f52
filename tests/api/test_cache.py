"""What clients say of the cache reaches the scheduler as it was meant, or is refused with words."""

from typing import Any

import openai
import pytest

from radixrt.api.requests.messages import to_template_messages, without_cache_control
from radixrt.api.requests.protocol import ChatMessage
from radixrt.messages.calls import CacheTreeCall, PinCall, ReleaseCacheCall
from radixrt.messages.ids import unpack_ids
from radixrt.messages.requests import CacheHints, Retention
from tests.api.conftest import RunningServer, StartServer, send, wait_until
from tests.servers.fake_scheduler import CACHE_WRITE_TOKENS, CACHED_TOKENS

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
COMPLETION = {"prompt": "hi", "max_tokens": 3}
NATIVE = {"text": "hi", "sampling_params": {"max_new_tokens": 3}}
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/generate": NATIVE}
EPHEMERAL = {"type": "ephemeral"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(server: RunningServer, path: str, body: object) -> tuple[int, dict[str, Any]]:
    with server.http as http:
        response = http.post(path, json=body)
    return response.status_code, response.json()


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("cache", "hints"),
    [
        ({}, CacheHints()),
        ({"retain": "high"}, CacheHints(retain=[Retention("high")])),
        (
            {"retain": "none", "ttl_s": 60, "until_token": 9},
            CacheHints(retain=[Retention("none", 9, 60.0)]),
        ),
        ({"next_use_s": 0.5, "session": "s"}, CacheHints(next_use_s=0.5, session="s")),
        (None, CacheHints()),
    ],
)
def test_hints_reach_the_scheduler(
    server: RunningServer, path: str, cache: Any, hints: CacheHints
) -> None:
    assert post(server, path, ENDPOINTS[path] | {"cache": cache})[0] == 200
    assert [request.options.cache_hints for request in server.scheduler.requests] == [hints]


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/cache/warm"])
@pytest.mark.parametrize(
    ("cache", "param", "words"),
    [
        ({"retain": "forever"}, "cache.retain", "none, default, high"),
        ({"retain": 5}, "cache.retain", "string"),
        ({"until_token": 5}, "cache.until_token", "cache.retain is missing"),
        ({"ttl_s": 5}, "cache.ttl_s", "cache.retain is missing"),
        ({"retain": "high", "until_token": 0}, "cache.until_token", "from 1 to"),
        ({"retain": "high", "until_token": -5}, "cache.until_token", "from 1 to"),
        ({"retain": "high", "until_token": 2**40}, "cache.until_token", "2147483647"),
        ({"retain": "high", "until_token": 1.5}, "cache.until_token", "integer"),
        ({"retain": "high", "ttl_s": 0}, "cache.ttl_s", "above 0"),
        ({"retain": "high", "ttl_s": -1}, "cache.ttl_s", "above 0"),
        ({"retain": "high", "ttl_s": 1e300}, "cache.ttl_s", "above 0"),
        ({"next_use_s": -1}, "cache.next_use_s", "from 0 to"),
        ({"session": ""}, "cache.session", "1 to 256"),
        ({"session": "s" * 257}, "cache.session", "1 to 256"),
        ({"pin": True}, "cache.pin", "leave it out"),
        ("high", "cache", "object"),
    ],
)
def test_a_bad_hint_is_named(
    server: RunningServer, path: str, cache: Any, param: str, words: str
) -> None:
    body = (COMPLETION if path == "/v1/cache/warm" else ENDPOINTS[path]) | {"cache": cache}
    status, answer = post(server, path, body)
    assert status == 400 and answer["error"]["param"] == param
    assert words in answer["error"]["message"]


# ---------------------------------------------------------------- cache_control


def marked(role: str, content: Any, **mark: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "cache_control": EPHEMERAL | mark}


def test_breakpoints_become_tokens_and_the_template_never_sees_them(server: RunningServer) -> None:
    messages: list[Any] = [
        marked("system", "be kind", ttl="1h"),
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": EPHEMERAL}]},
    ]
    plain = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    for body in ({"messages": messages}, {"messages": plain}):
        assert post(server, "/v1/chat/completions", body | {"max_tokens": 2})[0] == 200
    first, second = server.scheduler.requests
    assert first.token_ids == second.token_ids
    assert second.options.cache_hints == CacheHints()
    text = "<|im_start|>system\nbe kind<|im_end|>\n"
    lengths = [
        len(server.vocabulary.encode(t, add_special_tokens=False))
        for t in (text, text + "<|im_start|>user\nhi<|im_end|>\n")
    ]
    assert first.options.cache_hints.retain == [
        Retention("high", lengths[0], 3600.0),
        Retention("high", lengths[1], 300.0),
    ]


def test_breakpoints_of_the_openai_client(server: RunningServer) -> None:
    part: Any = {"type": "text", "text": "hi", "cache_control": EPHEMERAL}
    server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [part, part]}],
        extra_body={"cache": {"session": "s"}},
    )
    (request,) = server.scheduler.requests
    assert (
        request.options.cache_hints.session == "s" and len(request.options.cache_hints.retain) == 1
    )


@pytest.mark.parametrize("inside", [False, True])
def test_a_marked_tool_looks_to_the_template_like_any_other(
    server: RunningServer, inside: bool
) -> None:
    tool = TOOL | {"cache_control": EPHEMERAL}
    if inside:
        tool = {"type": "function", "function": TOOL["function"] | {"cache_control": EPHEMERAL}}  # type: ignore[operator]
    for tools in ([TOOL, tool], [TOOL, TOOL]):
        body = CHAT | {
            "tools": [
                t | {"function": t["function"] | {"name": n}}
                for t, n in zip(tools, "ab", strict=True)
            ]
        }  # type: ignore[operator]
        assert post(server, "/v1/chat/completions", body)[0] == 200
    first, second = server.scheduler.requests
    assert first.token_ids == second.token_ids
    assert len(first.options.cache_hints.retain) == 1 and not second.options.cache_hints.retain


def test_a_mark_that_says_nothing_is_not_shown_to_the_template() -> None:
    inside = {"type": "function", "function": TOOL["function"] | {"cache_control": None}}  # type: ignore[operator]
    for tool in (TOOL | {"cache_control": None}, inside):
        assert without_cache_control([tool]) == [TOOL]


def test_a_marked_tool_call_marks_its_message_and_the_template_never_sees_it(
    server: RunningServer,
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    marked_call = call | {"cache_control": EPHEMERAL}
    for each in (call, marked_call):
        messages = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [each]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ]
        assert post(server, "/v1/chat/completions", CHAT | {"messages": messages})[0] == 200
    first, second = server.scheduler.requests
    assert first.token_ids == second.token_ids
    assert not first.options.cache_hints.retain and len(second.options.cache_hints.retain) == 1
    shown = to_template_messages([ChatMessage(role="assistant", tool_calls=[marked_call])])
    assert "cache_control" not in shown[0]["tool_calls"][0]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": [marked("user", "x", ttl="2h")]}, "messages[0].cache_control", "5m"),
        ({"messages": [marked("user", "x", type="ever")]}, "messages[0].cache_control", "ephem"),
        ({"messages": [marked("user", "x", scope=1)]}, "messages[0].cache_control.scope", "leave"),
        (
            {"messages": [{"role": "user", "content": "x", "cache_control": "yes"}]},
            "messages[0].cache_control",
            "object",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "x", "cache_control": 5}],
                    }
                ]
            },
            "messages[0].content[0].cache_control",
            "ephemeral",
        ),
        ({"messages": [marked("user", "x")] * 5}, "cache_control", "at most 4"),
        (
            {"tools": [TOOL | {"cache_control": EPHEMERAL}, TOOL | {"function": {"name": "b"}}]},
            "tools[0].cache_control",
            "tools[1]",
        ),
    ],
)
def test_a_bad_breakpoint_is_named(
    server: RunningServer, body: dict[str, Any], param: str, words: str
) -> None:
    status, answer = post(server, "/v1/chat/completions", CHAT | body)
    assert status == 400 and answer["error"]["param"] == param
    assert words in answer["error"]["message"]


# ---------------------------------------------------------------- usage


def test_usage_tells_what_was_cached_and_what_was_written(server: RunningServer) -> None:
    expected = {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": CACHE_WRITE_TOKENS}
    for path in ("/v1/chat/completions", "/v1/completions"):
        usage = post(server, path, ENDPOINTS[path])[1]["usage"]
        assert usage["prompt_tokens_details"] == expected
    meta = post(server, "/generate", NATIVE)[1]["meta_info"]
    assert {name: meta[name] for name in expected} == expected


def test_a_stream_tells_its_usage_at_the_end(server: RunningServer) -> None:
    stream = server.openai.completions.create(
        model="tiny", prompt=["hi", "ho"], stream=True, stream_options={"include_usage": True}
    )
    usage = [chunk.usage for chunk in stream][-1]
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2 * CACHED_TOKENS
    written = usage.prompt_tokens_details.model_dump()["cache_write_tokens"]
    assert written == 2 * CACHE_WRITE_TOKENS


# ---------------------------------------------------------------- endpoints

PROMPTS: list[dict[str, Any]] = [
    {"prompt": "the fox"},
    {"token_ids": [5, 6, 7]},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]},
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_prompt_is_warmed_and_pinned_in_the_same_tokens(
    server: RunningServer, prompt: dict[str, Any]
) -> None:
    status, warmed = post(server, "/v1/cache/warm", prompt | {"cache_salt": "s"})
    assert status == 200
    status, pinned = post(server, "/v1/cache/pin", prompt | {"cache_salt": "s", "ttl_s": 60})
    assert status == 200
    first, second = server.scheduler.requests
    (pin,) = server.scheduler.cache_calls
    assert isinstance(pin, PinCall) and pin.ttl_s == 60
    assert first.token_ids == second.token_ids == pin.token_ids
    assert first.options.root.salt == second.options.root.salt == pin.root.salt == "s"
    num_tokens = len(unpack_ids(pin.token_ids))
    counts = {
        "prompt_tokens": num_tokens,
        "cached_tokens": CACHED_TOKENS,
        "cache_write_tokens": CACHE_WRITE_TOKENS,
    }
    assert warmed == counts
    lease = {"lease": "lease-1", "pinned_tokens": num_tokens, "expires_in_s": 60}
    assert pinned == counts | lease


def test_warming_takes_hints_and_the_beginning_of_a_conversation(server: RunningServer) -> None:
    messages = [{"role": "system", "content": "be kind"}]
    body = {"messages": messages, "cache": {"retain": "high", "session": "s"}}
    assert post(server, "/v1/cache/warm", body)[0] == 200
    (request,) = server.scheduler.requests
    assert request.options.cache_hints == CacheHints(retain=[Retention("high")], session="s")
    text = server.vocabulary.decode(unpack_ids(request.token_ids).tolist())
    assert text == "<|im_start|>system\nbe kind<|im_end|>\n"


@pytest.mark.parametrize("path", ["/v1/cache/warm", "/v1/cache/pin"])
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "messages", "not none"),
        ({"prompt": "x", "token_ids": [5]}, "token_ids", "prompt and token_ids"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"token_ids": []}, "token_ids", "empty"),
        ({"token_ids": [5, 4000]}, "token_ids", "4000"),
        ({"prompt": "x", "tools": [TOOL]}, "tools", "messages"),
        ({"messages": []}, "messages", "empty"),
        ({"prompt": "x", "timeout": 0}, "timeout", "above 0"),
        ({"prompt": "x " * 2000}, "max_tokens", "512"),
    ],
)
def test_what_cannot_be_warmed_is_refused(
    server: RunningServer, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    status, answer = post(server, path, body)
    assert status == 400 and words in answer["error"]["message"]
    assert answer["error"]["param"] in (param, "prompt")


def test_who_leaves_before_the_lease_is_there_leaves_none(server: RunningServer) -> None:
    server.scheduler.call_s = 1.0
    with send(server, {"prompt": "the fox"}, path="/v1/cache/pin"):
        wait_until(lambda: len(server.scheduler.cache_calls) == 1)
    wait_until(lambda: len(server.scheduler.cache_calls) == 2)
    pin, release = server.scheduler.cache_calls
    assert isinstance(pin, PinCall)
    assert isinstance(release, ReleaseCacheCall) and release.lease == "lease-1"


@pytest.mark.parametrize("ttl_s", [0, -1, 1e12])
def test_a_lease_without_a_sensible_time_is_refused(server: RunningServer, ttl_s: float) -> None:
    status, answer = post(server, "/v1/cache/pin", {"prompt": "x", "ttl_s": ttl_s})
    assert status == 400 and answer["error"]["param"] == "ttl_s"
    assert not server.scheduler.requests


def test_release_names_a_lease_or_a_session(server: RunningServer) -> None:
    for body, lease, session, salt in [
        ({"lease": "lease-1"}, "lease-1", "", ""),
        ({"session": "s", "cache_salt": "t"}, "", "s", "t"),
    ]:
        server.scheduler.cache_calls.clear()
        assert post(server, "/v1/cache/release", body) == (200, {"released_tokens": 32})
        (call,) = server.scheduler.cache_calls
        assert isinstance(call, ReleaseCacheCall)
        assert (call.lease, call.session, call.root.salt) == (lease, session, salt)
    assert post(server, "/v1/cache/release", {"lease": "gone"})[0] == 404


def test_release_names_many_sessions(server: RunningServer) -> None:
    server.scheduler.cache_calls.clear()
    body = {"sessions": ["a", "b", "c"], "cache_salt": "t"}
    assert post(server, "/v1/cache/release", body) == (200, {"released_tokens": 3 * 32})
    calls = [call for call in server.scheduler.cache_calls if isinstance(call, ReleaseCacheCall)]
    assert [(call.session, call.root.salt) for call in calls] == [(name, "t") for name in "abc"]
    assert post(server, "/v1/cache/release", {"sessions": []}) == (200, {"released_tokens": 0})


@pytest.mark.parametrize(
    "body",
    [
        {}, {"lease": "a", "session": "b"}, {"lease": ""}, {"session": ""}, {"session": 5},
        {"session": "a", "sessions": ["b"]}, {"sessions": ["a", ""]}, {"sessions": ["a"] * 1025},
    ],
)  # fmt: skip
def test_release_of_nothing_is_refused(server: RunningServer, body: dict[str, Any]) -> None:
    status, answer = post(server, "/v1/cache/release", body)
    assert status == 400 and answer["error"]["message"]
    assert not server.scheduler.cache_calls


def test_stats_add_up(server: RunningServer) -> None:
    with server.http as http:
        stats = http.get("/v1/cache/stats").json()
    assert stats["hit_rate"] == 0.4 and stats["page_size"] == 16
    assert stats["tokens"] == {name: 16 * count for name, count in stats["pages"].items()}


def test_the_tree_tells_texts_but_not_those_behind_a_salt(
    server: RunningServer, start_server: StartServer
) -> None:
    with server.http as http:
        tree = http.get("/v1/cache/tree?depth=2&children=5").json()
    (call,) = server.scheduler.cache_calls
    assert isinstance(call, CacheTreeCall) and (call.depth, call.children) == (2, 5)
    texts = {n["salted"]: n["children"][0]["text"] for n in tree["namespaces"]}
    assert texts == {False: server.vocabulary.decode([300, 301]), True: None}
    assert "first_token_ids" not in str(tree)
    silent = start_server(hide_cache_texts=True)
    with silent.http as http:
        tree = http.get("/v1/cache/tree").json()
    assert [n["children"][0]["text"] for n in tree["namespaces"]] == [None, None]


@pytest.mark.parametrize("query", ["depth=0", "depth=x", "children=1000"])
def test_a_tree_of_no_size_is_refused(server: RunningServer, query: str) -> None:
    with server.http as http:
        response = http.get(f"/v1/cache/tree?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


def test_the_cache_is_behind_the_key(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    with server.http as http:
        for path in ("stats", "tree"):
            assert http.get(f"/v1/cache/{path}").status_code == 401
        for path in ("warm", "pin", "release"):
            assert http.post(f"/v1/cache/{path}", json={}).status_code == 401
    with pytest.raises(openai.AuthenticationError):
        server.openai.models.list()
