"""A conversation that the server keeps is gone on from as if it had been sent again, by whom it
belongs to alone."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.api.conversations import store as store_module
from radixrt.api.conversations.continuation import Continuation, ConversationRecorder
from radixrt.api.conversations.store import MAX_MARKS, OVERHEAD_BYTES, ConversationStore
from radixrt.base.errors import RequestError
from tests.api.conftest import RunningServer, StartServer
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.suite import examples

SHOWS_ALL = (
    "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template in which every field of every message can be seen."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def showing(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    model = save_byte_level(tmp_path_factory.mktemp("showing"), SHOWS_ALL)
    return start_server(model=model, reasoning_parser="qwen3")


@pytest.fixture
def server(showing: RunningServer) -> RunningServer:
    showing.scheduler.requests.clear()
    showing.answer_with("Hello world")
    return showing


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def post(server: RunningServer, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    with server.http as http:
        return http.post(path, json={"max_tokens": 100} | body, headers=headers)


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = post(server, path, body | {"stream": True}).text.splitlines()
    return [httpx.Response(200, content=line[6:]).json() for line in lines if line[6:7] == "{"]


def prompt_of_last(server: RunningServer) -> str:
    from radixrt.messages.ids import unpack_ids

    ids = unpack_ids(server.scheduler.requests[-1].token_ids).tolist()
    return server.vocabulary.decode(ids)


def gone(response: httpx.Response) -> bool:
    return response.status_code == 404 and response.json()["error"]["code"] == "conversation_gone"


# ---------------------------------------------------------------- the same prompt as if all were sent


def test_a_conversation_goes_on_and_forks(server: RunningServer) -> None:
    first = post(server, CHAT, {"messages": [user("one")], "keep": True}).json()
    assert first["kept"] is True
    said = {"role": "assistant", "content": "Hello world"}
    for text in ("two", "three"):  # both from the same answer
        post(server, CHAT, {"messages": [user("one"), said, user(text)]})
        expected = prompt_of_last(server)
        post(server, CHAT, {"messages": [user(text)], "continue_from": first["id"]})
        assert prompt_of_last(server) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_thoughts_are_kept_as_the_template_needs_them(
    server: RunningServer, stream: bool
) -> None:
    server.answer_with(f"<think>Rain?</think>{CALL}")
    body = {"messages": [user("one")], "tools": TOOLS, "keep": True}
    if stream:
        pieces = events(server, CHAT, body)
        last, deltas = pieces[-1], [c["delta"] for piece in pieces for c in piece["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        call_id = calls[0]["id"]
        content = "".join(delta.get("content") or "" for delta in deltas)
        arguments = "".join(call["function"]["arguments"] for call in calls)
    else:
        last = post(server, CHAT, body).json()
        message = last["choices"][0]["message"]
        (call,) = message["tool_calls"]
        call_id, content, arguments = call["id"], message["content"], call["function"]["arguments"]
    assert last["kept"] is True
    called = {
        "id": call_id,
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    said = {
        "role": "assistant",
        "content": content,
        "tool_calls": [called],
        "reasoning_content": "Rain?",
    }
    result = {"role": "tool", "content": "Sun", "tool_call_id": call_id}
    post(server, CHAT, {"messages": [user("one"), said, result], "tools": TOOLS})
    expected = prompt_of_last(server)
    post(server, CHAT, {"messages": [result], "tools": TOOLS, "continue_from": last["id"]})
    assert prompt_of_last(server) == expected and '"days": 2' in expected and "Rain?" in expected


def test_a_part_of_a_conversation_is_gone_on_from(server: RunningServer) -> None:
    first = post(server, CHAT, {"messages": [user("one")], "keep": True}).json()
    second = post(
        server, CHAT, {"messages": [user("two")], "continue_from": first["id"], "keep": True}
    ).json()
    for count, kept in ((1, "one"), (3, "two")):
        body = {"messages": [user("new")], "continue_from": second["id"], "continue_after": count}
        assert post(server, CHAT, body).status_code == 200
        prompt = prompt_of_last(server)
        assert prompt.count('"role"') == count + 1 and kept in prompt and "new" in prompt
    again = {"messages": [], "continue_from": second["id"], "continue_after": 1}
    assert post(server, CHAT, again).status_code == 200
    assert prompt_of_last(server).count('"role"') == 1
    none = {"messages": [], "continue_from": second["id"], "continue_after": 0}
    assert post(server, CHAT, none).status_code == 400


@pytest.mark.parametrize("where", ["sent", "kept"])
def test_a_message_that_was_continued_is_one_message(
    shared_server: RunningServer, where: str
) -> None:
    server = shared_server
    server.answer_with("Hello world")
    begun = {"role": "assistant", "content": "Well, "}
    body: dict[str, Any] = {"messages": [user("one"), begun]}
    if where == "kept":
        server.answer_with("Well, ")
        first = post(server, CHAT, {"messages": [user("one")], "keep": True}).json()
        body = {"messages": [], "continue_from": first["id"]}
        server.answer_with("Hello world")
    answer = post(server, CHAT, body | {"continue_final_message": True, "keep": True}).json()
    whole = {"role": "assistant", "content": "Well, " + answer["choices"][0]["message"]["content"]}
    post(server, CHAT, {"messages": [user("one"), whole, user("two")]})
    expected = prompt_of_last(server)
    post(server, CHAT, {"messages": [user("two")], "continue_from": answer["id"]})
    assert prompt_of_last(server) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_goes_on(server: RunningServer, stream: bool) -> None:
    body = {"prompt": "Über ", "keep": True}
    last = events(server, TEXT, body)[-1] if stream else post(server, TEXT, body).json()
    assert last["kept"] is True
    post(server, TEXT, {"prompt": ". And", "continue_from": last["id"]})
    assert prompt_of_last(server) == "Über Hello world. And"
    post(server, TEXT, {"prompt": "x", "continue_from": last["id"], "continue_after": 2})
    assert prompt_of_last(server) == "Übx"


def test_of_several_answers_the_first_is_kept(server: RunningServer) -> None:
    answer = post(server, CHAT, {"messages": [user("one")], "keep": True, "n": 3}).json()
    assert answer["kept"] is True and len(answer["choices"]) == 3
    post(server, CHAT, {"messages": [user("two")], "continue_from": answer["id"]})
    assert prompt_of_last(server).count("Hello world") == 1


def test_breakpoints_count_from_the_beginning_of_the_conversation(server: RunningServer) -> None:
    marked = user("a longer message to mark") | {"cache_control": {"type": "ephemeral"}}
    first = post(server, CHAT, {"messages": [user("one")], "keep": True}).json()
    post(
        server,
        CHAT,
        {"messages": [user("one"), {"role": "assistant", "content": "Hello world"}, marked]},
    )
    post(server, CHAT, {"messages": [marked], "continue_from": first["id"]})
    sent, continued = server.scheduler.requests[-2:]
    assert (
        sent.options.cache_hints == continued.options.cache_hints
        and sent.options.cache_hints.retain
    )


def test_tokenize_goes_on_from_it_too(server: RunningServer) -> None:
    first = post(server, CHAT, {"messages": [user("one")], "keep": True}).json()
    body = {"messages": [user("two")], "continue_from": first["id"]}
    post(server, CHAT, body)
    assert post(server, "/tokenize", body).json()["prompt"] == prompt_of_last(server)


# ---------------------------------------------------------------- what is not kept, and for whom


def test_nobody_goes_on_with_another_s_conversation(server: RunningServer) -> None:
    body = {"messages": [user("secret")], "keep": True, "cache_salt": "mine"}
    kept = post(server, CHAT, body, authorization="Bearer a").json()["id"]
    going_on = {"messages": [user("two")], "continue_from": kept}
    mine = going_on | {"cache_salt": "mine"}
    assert gone(post(server, CHAT, going_on, authorization="Bearer a"))
    assert gone(post(server, CHAT, going_on | {"cache_salt": "other"}, authorization="Bearer a"))
    assert gone(post(server, CHAT, mine, authorization="Bearer b"))
    assert gone(
        post(server, CHAT, mine | {"continue_from": "chatcmpl-1"}, authorization="Bearer a")
    )
    assert post(server, CHAT, mine, authorization="Bearer a").status_code == 200


def test_what_was_not_asked_for_or_was_cut_off_is_not_kept(server: RunningServer) -> None:
    answer = post(server, CHAT, {"messages": [user("one")]}).json()
    assert "kept" not in answer
    assert gone(post(server, CHAT, {"messages": [user("two")], "continue_from": answer["id"]}))


def test_an_answer_that_was_dropped_is_not_kept() -> None:
    store = ConversationStore(1 << 20, ttl_s=10)
    for finish_reason, is_kept in (("abort", False), ("length", True)):
        recorder = ConversationRecorder(Continuation(store, b""), finish_reason, "a text")
        recorder.add("and an ans")
        assert recorder.end(finish_reason) is is_kept and len(store) == is_kept


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {"messages": [user("x")], "keep": True, "rid": "1"}, "keep", "leave rid out"),
        (CHAT, {"messages": [user("x")], "continue_after": 1}, "continue_after", "no continue_from"),
        (CHAT, {"messages": [user("x")], "keep": "yes"}, "keep", "boolean"),
        (TEXT, {"prompt": ["a", "b"], "keep": True}, "prompt", "single prompt"),
        (TEXT, {"prompt": [1, 2], "keep": True}, "prompt", "as text"),
    ],
)  # fmt: skip
def test_what_can_t_be_kept_is_refused(
    server: RunningServer, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    response = post(server, path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param and words in error["message"]


def test_an_id_of_another_endpoint_or_a_number_too_large_is_refused(server: RunningServer) -> None:
    chat = post(server, CHAT, {"messages": [user("one")], "keep": True}).json()["id"]
    response = post(server, TEXT, {"prompt": "x", "continue_from": chat})
    assert response.status_code == 400 and CHAT in response.json()["error"]["message"]
    body = {"messages": [user("x")], "continue_from": chat, "continue_after": 3}
    response = post(server, CHAT, body)
    assert response.status_code == 400 and "from 0 to 2" in response.json()["error"]["message"]


def test_times_are_told_to_who_asks(server: RunningServer) -> None:
    body = {"messages": [user("one")], "return_times": True}
    assert post(server, CHAT, body).json()["times"].keys() == {
        "encode_s", "grammar_s", "queued_s", "prefill_s", "total_s"
    }  # fmt: skip
    assert "times" in events(server, TEXT, {"prompt": "a", "return_times": True})[-1]
    assert "times" not in post(server, CHAT, {"messages": [user("one")]}).json()


# ---------------------------------------------------------------- the store against a plain dictionary


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_what_is_found_is_what_was_kept_and_no_more_room_is_taken_than_there_is(
    data: st.DataObject,
) -> None:
    clock = Clock()
    max_bytes = data.draw(st.integers(0, 12)) * (OVERHEAD_BYTES + 20)
    store = ConversationStore(max_bytes, ttl_s=10, clock=clock)
    whole: dict[str, str | list[dict[str, Any]]] = {}
    for number in range(data.draw(st.integers(1, 40))):
        clock.now += data.draw(st.sampled_from([0.0, 1.0, 6.0]))
        is_text = data.draw(st.booleans())
        words = data.draw(st.text("aß€", max_size=8))
        items: Any = words if is_text else [{"role": "user", "content": c} for c in words]
        parent, taken = None, 0
        same_kind = [key for key, value in whole.items() if isinstance(value, str) == is_text]
        if same_kind and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(same_kind))
            try:
                parent = store.find(key, b"me")
            except RequestError:
                continue
            taken = data.draw(st.integers(0, parent.length))
            items_before: Any = whole[key][:taken]
            expected = items_before + items
            if data.draw(st.booleans()):
                clock.now += data.draw(
                    st.sampled_from([0.0, 20.0])
                )  # forgotten while the answer came
                store.keep("between", b"me", "x")
        else:
            expected = items
        if store.keep(str(number), b"me", items, parent, taken):
            whole[str(number)] = expected
        assert store.num_bytes <= max_bytes
        for key in list(whole):
            try:
                found = store.find(key, b"me")
            except RequestError:
                del whole[key]
                continue
            assert found.first(found.length) == whole[key]
            half = found.length // 2
            assert found.first(half) == whole[key][:half]


def test_a_chain_costs_what_is_new_in_it_and_what_is_used_stays() -> None:
    clock = Clock()
    store = ConversationStore(1 << 20, ttl_s=10, clock=clock)
    document = "x" * 100_000
    store.keep("0", b"", document)
    for number in range(1, 100):
        parent = store.find(str(number - 1), b"")
        store.keep(str(number), b"", "y", parent, parent.length)
    assert store.num_bytes < 100_000 + 100 * (OVERHEAD_BYTES + 2)
    for _ in range(5):
        clock.now += 6
        store.find("50", b"")
    assert len(store) == 51  # it, and what it stands on
    clock.now += 11
    with pytest.raises(RequestError):
        store.find("50", b"")
    assert store.num_bytes == 0


def test_a_chain_of_thousands_is_bounded_and_nothing_recurses() -> None:
    """As 3,000 turns of /v1/responses, each with previous_response_id."""
    clock, max_bytes, depth = Clock(), 2_000_000, 3000
    store = ConversationStore(max_bytes, ttl_s=10, clock=clock)
    turn = [user("Go on."), {"role": "assistant", "content": "Hello world"}]
    size = len(msgspec.json.encode(turn)) + OVERHEAD_BYTES
    name = "resp-0"
    assert store.keep(name, b"", turn)
    with few_frames():
        for number in range(1, depth):
            parent = store.find(name, b"")
            name = f"resp-{number}"
            assert store.keep(name, b"", turn, parent, parent.length)
        last = store.find(name, b"")
        assert last.first(last.length) == turn * depth
        assert last.first(1) == turn[:1]
        assert store.num_bytes == depth * size <= max_bytes
        # Another chain takes its place, from its newest conversation on, and never more than there
        # is.
        parent = None
        for number in range(depth):
            other = f"other-{number}"
            store.keep(other, b"", turn, parent, 0 if parent is None else parent.length)
            parent = store.find(other, b"")
            assert store.num_bytes <= max_bytes
        assert parent is not None and parent.first(parent.length) == turn * depth
        with pytest.raises(RequestError):
            store.find(name, b"")
        del last, parent
        clock.now += 11
        with pytest.raises(RequestError):
            store.find(other, b"")
    assert len(store) == store.num_bytes == 0


@contextlib.contextmanager
def few_frames() -> Iterator[None]:
    """Nothing below this one may recurse deeply."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 50)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def test_a_text_that_grows_by_single_characters_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_LINKS", 30)
    store = ConversationStore(1 << 20, ttl_s=10)
    kept = [store.keep("0", b"", "x")]
    for number in range(1, 40):
        parent = store.find(str(min(number - 1, 29)), b"")
        kept.append(store.keep(str(number), b"", "y", parent, parent.length))
    assert kept == [True] * 30 + [False] * 10


def test_what_stands_on_nothing_goes_first() -> None:
    store = ConversationStore(3 * (OVERHEAD_BYTES + 1), ttl_s=10, clock=Clock())
    store.keep("a", b"", "1")
    store.keep("b", b"", "2", store.find("a", b""), 1)
    store.keep("c", b"", "3")
    store.find("b", b"")
    store.keep("d", b"", "4")
    with pytest.raises(RequestError):
        store.find("c", b"")
    assert store.find("b", b"").first(2) == "12"
    assert not store.keep("large", b"", "x" * 10_000)


def test_a_server_without_room_keeps_nothing(start_server: StartServer, model_folder: Path) -> None:
    server = start_server(model=model_folder, kept_conversations_mb=0)
    server.answer_with("Hello world")
    answer = post(server, CHAT, {"messages": [user("one")], "keep": True}).json()
    assert answer["kept"] is False


def test_a_conversation_that_would_take_long_to_read_is_not_kept() -> None:
    """Its parts are counted with those of its parents."""
    store = ConversationStore(1 << 30, ttl_s=10)
    half = [{"role": "user", "content": "[" * (MAX_MARKS // 2)}]
    assert store.keep("a", b"", half)
    assert store.keep("b", b"", [{"role": "user", "content": ""}], store.find("a", b""), 1)
    assert not store.keep("c", b"", half, store.find("b", b""), 2)
    assert not store.keep("d", b"", [{"role": "user", "content": ""}] * 10_001)
