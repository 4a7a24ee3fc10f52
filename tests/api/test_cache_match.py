"""``/v1/cache/match`` tells how much of each prompt is cached now, computes nothing, and tells
nobody what others have asked."""

from typing import Any

import pytest

import radixrt.lang as rl
from tests.api.conftest import RunningServer, StartServer
from tests.api.test_keys import key_file
from tests.servers.fake_scheduler import engine_info
from tests.servers.real_scheduler import RealScheduler

PAGE = 4
TEXT = "The quick brown fox jumps over the lazy dog. Hello world, how are you today?"
INFO = engine_info(page_size=PAGE, kv_pool_tokens=2048)


@pytest.fixture(scope="module")
def plain(start_server: StartServer) -> RunningServer:
    return start_server(info=INFO, scheduler_type=RealScheduler)


@pytest.fixture(scope="module")
def keyed(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    keys = key_file(tmp_path_factory.mktemp("keys"))
    return start_server(info=INFO, scheduler_type=RealScheduler, api_keys=str(keys))


def call(server: RunningServer, path: str, body: dict[str, Any], key: str = "") -> Any:
    with server.http as http:
        return http.post(path, json=body, headers={"Authorization": f"Bearer {key}"} if key else {})


def cached(server: RunningServer, body: dict[str, Any], key: str = "") -> list[int]:
    response = call(server, "/v1/cache/match", body, key)
    assert response.status_code == 200, response.text
    return [match["cached_tokens"] for match in response.json()["matches"]]


def test_each_form_of_a_prompt_is_found_as_a_request_would_find_it(plain: RunningServer) -> None:
    ids = plain.vocabulary.encode(TEXT, add_special_tokens=True)
    chat = {"messages": [{"role": "user", "content": TEXT}]}
    prompts = [TEXT, ids, TEXT + " And more.", "Something else", chat]
    assert cached(plain, {"prompts": prompts}) == [0] * 5
    before = plain.scheduler.process.scheduler.state.counters.prompt_tokens
    assert before == 0, "nothing is computed"
    call(plain, "/v1/cache/warm", {"prompt": TEXT})
    call(plain, "/v1/cache/warm", chat)
    whole = len(ids) // PAGE * PAGE
    *texts, chat_tokens = cached(plain, {"prompts": prompts})
    assert texts == [whole, whole, whole, 0] and chat_tokens > whole
    assert cached(plain, {"prompts": [TEXT], "cache_salt": "other"}) == [0]


def test_orders_of_parts(plain: RunningServer) -> None:
    parts = ["Read this first. ", "One passage of some length. ", "Another passage, as long. "]
    call(plain, "/v1/cache/warm", {"prompt": "".join(parts[i] for i in (0, 2, 1))})
    counts = cached(plain, {"parts": parts, "orders": [[0, 1, 2], [0, 2, 1], [0], [1, 0]]})
    first = len(plain.vocabulary.encode(parts[0], add_special_tokens=True))
    assert counts[1] > counts[0] >= (first - 1) // PAGE * PAGE >= counts[2] - PAGE
    assert counts[3] == 0


def test_with_several_keys_only_salted_requests_are_told(keyed: RunningServer) -> None:
    call(keyed, "/v1/cache/warm", {"prompt": TEXT}, "alice-key")
    call(keyed, "/v1/cache/warm", {"prompt": TEXT, "cache_salt": "mine"}, "alice-key")
    for key in ("alice-key", "bob-key", "root-key"):
        response = call(keyed, "/v1/cache/match", {"prompts": [TEXT]}, key)
        assert response.status_code == 403 and "cache_salt" in response.text
    salted = {"prompts": [TEXT], "cache_salt": "mine"}
    assert cached(keyed, salted, "alice-key")[0] > 0
    assert cached(keyed, salted, "bob-key") == cached(keyed, salted, "root-key") == [0]


def test_the_language_orders_by_rank_where_it_is_told_nothing(keyed: RunningServer) -> None:
    texts = ["The port of Vidur is Noval, as all know. ", TEXT]
    for salt in ("orders", None):
        body = {"prompt": f"{TEXT}\n\n"} | ({} if salt is None else {"cache_salt": salt})
        call(keyed, "/v1/cache/warm", body, "alice-key")
        backend = rl.Server(keyed.url, api_key="alice-key", cache_salt=salt)
        assert rl.order_documents(texts, backend=backend) == ([1, 0] if salt else [0, 1])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompts"),
        ({"prompts": ["a"], "parts": ["a"], "orders": [[0]]}, "prompts"),
        ({"parts": ["a"]}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": ["a"] * 257}, "prompts"),
        ({"parts": ["a"], "orders": [[0], [1]]}, "orders[1]"),
        ({"parts": ["a"], "orders": [[-1]]}, "orders[0]"),
        ({"prompts": [[5000]]}, "prompts[0]"),
        ({"prompts": [{"messages": []}]}, "messages"),
        ({"prompts": [{}]}, "messages"),
        ({"prompts": [""]}, "prompt"),
    ],
)
def test_a_bad_request_is_explained(plain: RunningServer, body: dict[str, Any], param: str) -> None:
    response = call(plain, "/v1/cache/match", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
