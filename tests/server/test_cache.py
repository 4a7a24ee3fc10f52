"""What clients say of the cache holds on a real server: who is to stay stays, and no answer
changes."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import RunningServer
from tests.servers import Server
from tests.servers.servers_in_process import serving_in_process

PAGE = 4
DEFAULT_POOLING = 1024
LENGTH = 120
"""Tokens of a prompt."""
LONGEST_PIN_S = 3600

Cache = dict[str, Any]


class Client:
    """The openai client, for prompts in token ids, and the endpoints that it does not know."""

    def __init__(self, server: Server | RunningServer) -> None:
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        self.http = httpx.Client(base_url=server.url, timeout=60)
        self._new_prompt = itertools.count()

    def new_prompt(self, length: int = LENGTH) -> list[int]:
        """Token ids that no other prompt begins with."""
        rng = random.Random(next(self._new_prompt))
        return [rng.randrange(20, 380) for _ in range(length)]

    def ask(self, prompt: Any, cache: Cache | None = None, **settings: Any) -> Any:
        extra: dict[str, Any] = {"ignore_eos": True, "cache": cache} | settings.pop("extra", {})
        return self.openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=3, temperature=0, extra_body=extra, **settings
        )

    def cached(self, prompt: list[int], **extra: Any) -> int:
        """How much of a prompt is in the cache: one that is asked for is in it afterwards."""
        details = self.ask(prompt, extra=extra).usage.prompt_tokens_details
        return int(details.cached_tokens)

    def flood(self, tokens: int = 2 * DEFAULT_POOLING, cache: Cache | None = None) -> None:
        """Let others ask, four at a time, in so many tokens; four need less than half of the pool
        to run."""
        count = tokens // LENGTH
        while count > 0:
            self.ask([self.new_prompt() for _ in range(min(4, count))], cache)
            count -= 4

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.http.post(f"/v1/cache/{path}", json=body)
        assert response.status_code == 200, response.text
        return dict(response.json())

    def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        response = self.http.post(f"/v1/cache/{path}", json=body)
        return response.status_code, response.json()["error"]["message"]

    def stats(self) -> dict[str, Any]:
        return dict(self.http.get("/v1/cache/stats").json())


@pytest.fixture(scope="module")
def small_server(served_checkpoint: Path) -> Iterator[RunningServer]:
    sizes = {"page_size": PAGE, "max_total_tokens": DEFAULT_POOLING}
    with serving_in_process(served_checkpoint, **sizes) as server:
        yield server


@pytest.fixture
def client(small_server: RunningServer) -> Iterator[Client]:
    """With an empty cache; every page is accounted for afterwards."""
    client = Client(small_server)
    client.http.post("/flush_cache")
    yield client
    stats = small_server.info(check_invariants=True)["stats"]
    assert stats["leases"] == stats["pages_pinned"] == stats["pages_owned"] == 0


HINTS: list[Cache] = [
    {"retain": "none"},
    {"retain": "high"},
    {"retain": "high", "ttl_s": 0.05, "until_token": 50},
    {"next_use_s": 0, "session": "s"},
    {"next_use_s": 100, "retain": "default"},
]


def test_no_hint_changes_an_answer(client: Client, server: Server) -> None:
    prompts = [client.new_prompt() for _ in range(6)]
    elsewhere = Client(server)
    expected = [elsewhere.ask(prompt).choices[0].text for prompt in prompts]
    rng = random.Random(5)
    for _ in range(25):  # more than the cache holds
        index = rng.randrange(6)
        answer = client.ask(prompts[index], rng.choice(HINTS))
        assert answer.choices[0].text == expected[index]
        client.ask(client.new_prompt(), rng.choice(HINTS))


def test_what_is_retained_outlasts_what_is_not(client: Client) -> None:
    mine = client.new_prompt()
    client.ask(mine, {"retain": "high"})
    client.flood()
    assert client.cached(mine) >= LENGTH - PAGE


def test_without_a_hint_the_same_is_gone(client: Client) -> None:
    mine = client.new_prompt()
    client.ask(mine)
    client.flood()
    assert client.cached(mine) == 0


def test_only_the_tokens_that_are_spoken_for_outlast(client: Client) -> None:
    mine = client.new_prompt()
    client.ask(mine, {"retain": "high", "until_token": 50})
    client.flood(4 * DEFAULT_POOLING)
    assert client.cached(mine) == 50 // PAGE * PAGE


def test_what_is_retained_with_none_goes_first(client: Client) -> None:
    kept, given_up = client.new_prompt(), client.new_prompt()
    client.ask(kept)
    client.ask(given_up, {"retain": "none"})  # used later
    client.flood(DEFAULT_POOLING - LENGTH)
    assert client.cached(kept) >= LENGTH - PAGE
    assert client.cached(given_up) < LENGTH - PAGE


def test_breakpoints_keep_the_conversation_up_to_them(client: Client) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system: Any = {
        "role": "system",
        "content": [{"type": "text", "text": "Be kind to each other. " * 4, "cache_control": mark}],
    }
    question: Any = {"role": "user", "content": "Where is the port of Vidur, and who owns it?"}
    answers = []
    for _ in range(2):
        answer = client.openai.chat.completions.create(
            model="tiny", messages=[system, question], max_tokens=3, temperature=0
        )
        answers.append(answer)
        client.flood()
    plain = [{"role": "system", "content": system["content"][0]["text"]}]
    length = client.http.post(
        "/tokenize", json={"messages": plain, "add_generation_prompt": False}
    ).json()["count"]
    assert answers[1].usage is not None and answers[1].usage.prompt_tokens_details is not None
    assert answers[1].usage.prompt_tokens_details.cached_tokens == length // PAGE * PAGE
    assert answers[0].choices[0].message == answers[1].choices[0].message


# ---------------------------------------------------------------- warm, pin, release


def test_what_is_warmed_is_cached_for_the_next(client: Client) -> None:
    mine = client.new_prompt()
    before = client.stats()["prompt_tokens"]
    first = client.post("warm", token_ids=mine)
    assert first == {"prompt_tokens": LENGTH, "cached_tokens": 0, "cache_write_tokens": LENGTH}
    again = client.post("warm", token_ids=mine)
    assert again["cached_tokens"] + again["cache_write_tokens"] <= LENGTH
    assert again["cached_tokens"] >= LENGTH - PAGE
    assert client.cached([*mine, 25]) == LENGTH
    assert client.stats()["prompt_tokens"] - before == 3 * LENGTH + 1


def test_the_longest_prompt_can_be_warmed(client: Client) -> None:
    assert client.post("warm", token_ids=client.new_prompt(512))["prompt_tokens"] == 512
    status, message = client.refusal("warm", token_ids=client.new_prompt(513))
    assert status == 400 and "512" in message and "max_tokens" not in message


def test_warming_generates_nothing(client: Client, small_server: RunningServer) -> None:
    before = small_server.info()["stats"]["output_tokens"]
    client.post("warm", prompt="Once upon a time")
    assert small_server.info()["stats"]["output_tokens"] == before


def test_a_pinned_prefix_survives_what_evicts_all_else(client: Client) -> None:
    mine, other = client.new_prompt(), client.new_prompt()
    pin = client.post("pin", token_ids=mine, ttl_s=60)
    assert pin["pinned_tokens"] == pin["prompt_tokens"] == LENGTH and 0 < pin["expires_in_s"] <= 60
    client.ask(other)
    client.flood(cache={"retain": "high"})
    assert client.stats()["tokens"]["pinned"] == LENGTH
    assert client.cached([*mine, 25]) == LENGTH
    assert client.cached(other) == 0
    assert client.post("release", lease=pin["lease"]) == {"released_tokens": LENGTH}
    client.flood()
    assert client.cached([*mine, 25]) == 0


def test_a_lease_ends_by_itself(client: Client) -> None:
    pin = client.post("pin", token_ids=client.new_prompt(), ttl_s=0.2)
    while client.stats()["leases"]:
        pass
    assert client.refusal("release", lease=pin["lease"])[0] == 404


def test_pins_have_bounds_and_leave_room_for_others(client: Client) -> None:
    leases = []
    while True:
        response = client.http.post(
            "/v1/cache/pin", json={"token_ids": client.new_prompt(), "ttl_s": 60}
        )
        if response.status_code != 200:
            break
        leases.append(response.json()["lease"])
    assert response.status_code == 429 and "release" in response.json()["error"]["message"].lower()
    assert len(leases) == DEFAULT_POOLING // 2 // LENGTH
    client.flood()
    for lease in leases:
        client.post("release", lease=lease)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "Once upon a time", "ttl_s": LONGEST_PIN_S + 1}, str(LONGEST_PIN_S)),
        ({"token_ids": [7] * 513}, "512"),
    ],
)
def test_what_cannot_be_pinned_is_refused(client: Client, body: dict[str, Any], words: str) -> None:
    status, message = client.refusal("pin", **body)
    assert status == 400 and words in message


def test_a_session_that_has_ended_goes_first(client: Client) -> None:
    going, ended = client.new_prompt(), client.new_prompt()
    client.ask(going, {"session": "going"})
    client.ask(ended, {"session": "ended", "retain": "high"})  # used later
    assert client.post("release", session="ended")["released_tokens"] >= LENGTH - PAGE
    client.flood(DEFAULT_POOLING - LENGTH)
    assert client.cached(going) >= LENGTH - PAGE
    assert client.cached(ended) < LENGTH - PAGE
    assert client.post("release", session="never heard of")["released_tokens"] == 0


def test_only_who_knows_the_salt_can_reach_behind_it(client: Client) -> None:
    mine = client.new_prompt()
    client.ask(mine, {"session": "s"}, extra={"cache_salt": "mine"})
    assert client.post("warm", token_ids=mine)["cached_tokens"] == 0
    assert client.post("warm", token_ids=mine, cache_salt="theirs")["cached_tokens"] == 0
    assert client.post("release", session="s")["released_tokens"] == 0
    assert client.post("release", session="s", cache_salt="mine")["released_tokens"] > 0
    again = client.post("warm", token_ids=mine, cache_salt="mine")
    assert again["cached_tokens"] >= LENGTH - PAGE


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("stream", [False, True])
def test_cached_written_and_the_rest_add_up_to_the_prompt(client: Client, stream: bool) -> None:
    base = client.new_prompt(90)
    before = client.stats()
    sums = [0, 0, 0]
    for length in (90, 90, 89, 61, 3, 4, 5):
        if stream:
            options: Any = {"include_usage": True}
            usage = [
                c.usage for c in client.ask(base[:length], stream=True, stream_options=options)
            ][-1]
        else:
            usage = client.ask(base[:length]).usage
        details = usage.prompt_tokens_details.model_dump()
        cached, written = details["cached_tokens"], details["cache_write_tokens"]
        assert cached % PAGE == 0
        assert 0 <= usage.prompt_tokens - cached - written < PAGE + 1
        sums = [total + new for total, new in zip(sums, (length, cached, written), strict=True)]
    after = client.stats()
    names = ("prompt_tokens", "cached_tokens", "cache_write_tokens")
    assert [after[name] - before[name] for name in names] == sums


def test_the_tree_tells_what_prompts_begin_with(client: Client) -> None:
    client.ask("The harbor book of Vidur: " * 3)
    client.ask("The harbor book of Noval: " * 3)
    client.ask("A secret harbor book: " * 3, extra={"cache_salt": "tenant"})
    tree = client.http.get("/v1/cache/tree?depth=2").json()
    open_roots, salted = sorted(tree["namespaces"], key=lambda namespace: namespace["salted"])
    (shared,) = open_roots["children"]
    assert shared["text"].startswith("The harbor book of") and len(shared["children"]) == 2
    below = sum(child["total_tokens"] for child in shared["children"])
    assert shared["total_tokens"] == shared["num_tokens"] + below
    assert [child["text"] for child in salted["children"]] == [None]
    assert "secret" not in str(tree)


def test_stats_are_those_of_the_pool(client: Client) -> None:
    client.ask(client.new_prompt())
    stats = client.stats()
    pages = stats["pages"]
    assert (
        pages["owned"] + pages["cached"] + pages["free"]
        == pages["total"]
        == DEFAULT_POOLING // PAGE
    )
    assert stats["tokens"]["total"] == DEFAULT_POOLING and stats["tokens"]["cached"] >= LENGTH
