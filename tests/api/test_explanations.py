"""Explanations of cache misses: the causes, the exact token, and nobody else's text.

The api, the tokenizer and the scheduler are the real ones; the worker answers as it is told. Where
a prompt leaves the cached ones is compared with a search through the token lists of all requests
before.
"""

import itertools
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from radixrt.messages.cache_explanation import CacheExplanation
from radixrt.messages.cache_root import CacheRoot
from radixrt.scheduler.radix.ghosts import GhostList
from tests.api.conftest import RunningServer, StartServer
from tests.api.test_keys import key_file
from tests.checkpoints.tiny_tokenizers import save_byte_level
from tests.servers.fake_scheduler import engine_info
from tests.servers.real_scheduler import RealScheduler

PAGE = 4
DEFAULT_POOLING = 32768
CLEAN_TURNS = 500 if "RADIXRT_TORTURE" in os.environ else 150

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if stamp and loop.last %}[last] {% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}<think>\n{% endif %}{% endif %}"
)
"""Marks the last message with ``stamp``, and opens a thought with ``think``: both are gone in the
next turn."""

SYSTEM = {
    "role": "system",
    "content": "You are a careful assistant who answers in the words of the fox.",
}


@dataclass
class Client:
    """A client with a key, and the token lists of its requests."""

    server: RunningServer
    key: str = "alice"
    sequences: list[list[int]] = field(default_factory=list)
    """Prompt and answer of each request, as far as they are comparable."""

    def __post_init__(self) -> None:
        headers = {"authorization": f"Bearer {self.key}-key"}
        self.http = httpx.Client(base_url=self.server.url, headers=headers, timeout=20)

    def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        response = self.http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def chat(self, *messages: dict[str, Any], note: bool = True, **fields: Any) -> dict[str, Any]:
        """The response; its prompt must leave the earlier sequences where the explanation says."""
        body = {"messages": messages, "max_tokens": 200, "return_token_ids": True, "cache": {"explain": True}}  # fmt: skip
        answer: dict[str, Any] = self.post("/v1/chat/completions", body | fields)
        prompt = answer["prompt_token_ids"]
        self.check_index(prompt, answer["cache_explanation"])
        if note:
            self.sequences.append(prompt + answer["choices"][0]["token_ids"])
        return answer

    def check_index(self, prompt: list[int], explained: dict[str, Any]) -> None:
        seen = max((_common(prompt, other) for other in self.sequences), default=0)
        if explained["divergence"] is None:
            assert explained["cause"] in ("none", "missing_state") or seen >= len(prompt) - 1
        else:
            assert explained["divergence"]["token_index"] == seen

    def explained(self, *messages: dict[str, Any], **fields: Any) -> CacheExplanation:
        answer = self.chat(*messages, **fields)
        found = msgspec.convert(answer["cache_explanation"], CacheExplanation)
        again = self.get(f"/v1/cache/explain/{answer['id']}")
        assert again.status_code == 200, again.text
        assert again.json() == answer["cache_explanation"]
        usage = answer["usage"]
        assert found.request_id == answer["id"]
        assert found.prompt_tokens == usage["prompt_tokens"]
        assert found.cached_tokens == usage["prompt_tokens_details"]["cached_tokens"]
        assert found.missed_tokens == found.prompt_tokens - found.cached_tokens
        return found

    def completion(self, prompt: list[int]) -> dict[str, Any]:
        """The explanation of a prompt in tokens."""
        body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, "cache": {"explain": True}}  # fmt: skip
        answer = self.post("/v1/completions", body)
        self.check_index(prompt, answer["cache_explanation"])
        self.sequences.append(prompt + answer["choices"][0]["token_ids"])
        again = self.get(f"/v1/cache/explain/{answer['id']}").json()
        assert again == answer["cache_explanation"] | {"request_id": answer["id"]}
        return again


def _common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix, token by token."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def scheduled(start_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    return start_server(
        info=engine_info(page_size=PAGE, kv_pool_tokens=DEFAULT_POOLING, context_length=2048),
        model=save_byte_level(tmp_path_factory.mktemp("model"), TEMPLATE),
        scheduler_type=RealScheduler,
        api_keys=str(key_file(tmp_path_factory.mktemp("keys"))),
    )


@pytest.fixture
def client(scheduled: RunningServer) -> Iterator[Client]:
    """On an empty cache."""
    answer_with(scheduled, "The quick fox, of course.")
    root = Client(scheduled, "root")
    assert root.post("/flush_cache", {})["success"]
    scheduled.scheduler.process.scheduler.state.kv.tree.ghosts = GhostList()
    yield Client(scheduled)


def answer_with(server: RunningServer, text: str) -> None:
    ids = server.vocabulary.encode(text, add_special_tokens=False)
    server.scheduler.worker.script = lambda prompt: [*ids, 1]


# ------------------------------------------------------------ the causes


def test_a_new_prompt_was_never_seen(client: Client) -> None:
    first = client.explained(SYSTEM, user("Who jumps over the lazy dog?"))
    assert (first.cause, first.cached_tokens) == ("never_seen", 0)
    other = client.explained(SYSTEM, user("Is it the bear?"))
    assert other.cause == "never_seen" and other.divergence is not None
    assert (other.divergence.message_index, other.divergence.role) == (1, "user")
    assert other.divergence.prompt_text.startswith("Is it the bear?")
    assert other.divergence.cached_text.startswith("Who jumps")


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        ("2026-11-21", "2026-11-22", "date"),
        ("November 21", "December 1", "date"),
        ("10:42:07", "9:01:55", "time"),
        ("cc_version=2.1; cch=0a1f3;", "cc_version=2.1; cch=9b2e0;", "hash or an id"),
        ("3f2b8c1e-77aa-4c1d-9c55-1f2e3d4c5b6a", "9f2b8c1e-77aa-4c1d-9c55-1f2e3d4c5b6b", "UUID"),
        ("1841", "1842", "number"),
    ],
)
def test_volatile_text_in_the_system_message(
    client: Client, one: str, other: str, kind: str
) -> None:
    def system(text: str) -> dict[str, Any]:
        return {"role": "system", "content": f"You are the fox of {text} and careful in answers."}

    client.explained(system(one), user("Who are you?"))
    found = client.explained(system(other), user("Who are you?"))
    assert found.cause == "volatile_text" and kind in found.detail
    assert (found.divergence.message_index, found.divergence.role) == (0, "system")


def test_another_number_in_a_new_question_is_a_new_question(client: Client) -> None:
    client.explained(SYSTEM, user("How many are 17 and 4?"))
    assert client.explained(SYSTEM, user("How many are 23 and 4?")).cause == "never_seen"


def test_a_number_before_a_long_document_is_volatile(client: Client) -> None:
    document = "The quick brown fox jumps over the lazy dog. " * 8
    client.explained(user(f"Request 17. {document}"))
    assert client.explained(user(f"Request 18. {document}")).cause == "volatile_text"


def test_a_flushed_prompt_was_evicted(client: Client) -> None:
    messages = SYSTEM, user("Who jumps over the lazy dog?")
    client.explained(*messages)
    Client(client.server, "root").post("/flush_cache", {})
    client.sequences.clear()
    found = client.explained(*messages)
    assert found.cause == "evicted" and found.evicted.rule == "flush"
    assert 0 <= found.evicted.seconds_ago < 20


def test_the_end_of_a_conversation_was_evicted_by_its_rule(client: Client) -> None:
    """Of two answers to one beginning, only the one that is retained less is evicted by the next
    prompts."""
    client.explained(SYSTEM, user("Who jumps over the lazy dog?"))
    bear = SYSTEM, user("Is it the bear? " + "It is not the fox. " * 8)
    client.explained(*bear, cache={"explain": True, "retain": "none"})
    bear_tokens = client.sequences.pop()
    kv = client.server.scheduler.process.scheduler.state.kv
    for number in itertools.count(200):
        length = min(1500, kv.allocator.num_free * PAGE + 40)  # the last one needs ten pages more
        filler = [number, *(250 + i * i % 97 for i in range(length - 1))]
        client.post("/v1/completions", {"prompt": filler, "max_tokens": 1})
        client.sequences.append(filler)
        if length < 1500:
            break
    cached = kv.tree.match(np.array(bear_tokens, np.int32), CacheRoot("key:alice"))
    client.sequences.append(bear_tokens[: cached.num_pages * PAGE])
    found = client.explained(*bear)
    assert found.cause == "evicted" and found.evicted.rule == "retain=none"
    assert 0 < found.cached_tokens == found.divergence.token_index < found.prompt_tokens - PAGE


def test_another_salt_of_the_same_key(client: Client) -> None:
    messages = SYSTEM, user("Who jumps over the lazy dog?")
    client.explained(*messages, cache_salt="one")
    client.sequences.clear()
    found = client.explained(*messages, cache_salt="two")
    assert found.cause == "other_salt" and found.divergence.cached_text == ""


def test_tools_in_another_order(client: Client) -> None:
    question = user("Who jumps over the lazy dog?")
    client.explained(SYSTEM, question, tools=[tool("fox"), tool("dog")])
    found = client.explained(SYSTEM, question, tools=[tool("dog"), tool("fox")])
    assert found.cause == "tools_changed" and "order" in found.detail
    assert (found.divergence.message_index, found.divergence.role) == (None, None)


def test_another_tool(client: Client) -> None:
    question = user("Who jumps over the lazy dog?")
    client.explained(SYSTEM, question, tools=[tool("fox"), tool("dog")])
    found = client.explained(SYSTEM, question, tools=[tool("fox"), tool("bear")])
    assert found.cause == "tools_changed" and "tool 1 ('bear')" in found.detail


def test_the_tools_of_another_client_are_no_cause(client: Client) -> None:
    client.explained(SYSTEM, user("Who jumps over the lazy dog?"), tools=[tool("fox")])
    assert client.explained(user("Sing of the bees!")).cause == "never_seen"
    assert client.explained(user("Sing of the ants!"), tools=[tool("bee")]).cause == "never_seen"


def test_all_tools_are_others(client: Client) -> None:
    client.explained(SYSTEM, user("Who jumps over the lazy dog?"), tools=[tool("fox")])
    found = client.explained(SYSTEM, user("Sing!"), tools=[tool("bee")])
    assert found.cause == "tools_changed"


def test_the_template_rewrites_an_earlier_message(client: Client) -> None:
    messages = [SYSTEM, user("Who jumps over the lazy dog?")]
    stamped = {"chat_template_kwargs": {"stamp": True}}
    answer = client.chat(*messages, **stamped)["choices"][0]["message"]
    found = client.explained(*messages, assistant(answer["content"]), user("Sure?"), **stamped)
    assert found.cause == "template_rewrote_history"
    assert (found.divergence.message_index, found.divergence.role) == (1, "user")
    assert found.divergence.cached_text.startswith("[last]")


def test_the_template_drops_what_the_model_wrote(client: Client) -> None:
    answer_with(client.server, "The lazy dog lies, so I take the other.\n</think>\n\nThe fox.")
    messages = [SYSTEM, user("Who jumps over the lazy dog?")]
    thinking = {"chat_template_kwargs": {"think": True}}
    content = client.chat(*messages, **thinking)["choices"][0]["message"]["content"]
    found = client.explained(*messages, assistant(content), user("Sure?"), **thinking)
    assert found.cause == "template_rewrote_history"
    assert (found.divergence.message_index, found.divergence.role) == (2, "assistant")
    assert "think" in found.divergence.cached_text


def test_an_answer_that_the_client_has_changed_is_new_text(client: Client) -> None:
    messages = [SYSTEM, user("Who jumps over the lazy dog?")]
    client.chat(*messages)
    found = client.explained(*messages, assistant("The bear, I think."), user("Sure?"))
    assert found.cause == "never_seen" and found.divergence.message_index == 2


@pytest.mark.parametrize(("length", "cause"), [(41, "none"), (43, "page_rounding"), (40, "page_rounding")])  # fmt: skip
def test_a_repeated_prompt_misses_an_incomplete_page_at_most(
    client: Client, length: int, cause: str
) -> None:
    prompt = [100 + i for i in range(length)]
    assert client.completion(prompt)["cause"] == "never_seen"
    again = client.completion(prompt)
    assert (again["cause"], again["divergence"]) == (cause, None)
    assert again["cached_tokens"] == (length - 1) // PAGE * PAGE


def test_log_probabilities_of_the_prompt_are_no_miss(client: Client) -> None:
    client.explained(SYSTEM, user("Who jumps?"))
    found = client.explained(SYSTEM, user("Who jumps?"), prompt_logprobs=0)
    assert (found.cause, found.cached_tokens) == ("none", 0) and "log-probabilities" in found.detail


def test_tokens_whose_state_is_gone_are_told_as_such(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Also where the whole prompt was seen before."""
    info = engine_info(page_size=PAGE, kept_states=40, state_bytes=8 * PAGE * 1024)
    model = save_byte_level(tmp_path, TEMPLATE)
    server = start_server(info=info, model=model, scheduler_type=RealScheduler)
    answer_with(server, "The fox.")
    client, shared = Client(server), [100 + i for i in range(30)]
    client.completion([*shared, *range(200, 210)])
    left = client.completion([*shared, *range(300, 305)])
    assert (left["cause"], left["cached_tokens"]) == ("missing_state", 0)
    assert client.completion([*shared, 330])["cached_tokens"] == 28
    kv = server.scheduler.process.scheduler.state.kv
    for page in list(kv.states.pages().values()):
        kv.states.drop_of(page)
    again = client.completion([*shared, *range(300, 305)])
    assert (again["cause"], again["cached_tokens"]) == ("missing_state", 0)
    counters = server.scheduler.process.scheduler.state.counters
    assert (counters.stateless_hits, counters.stateless_tokens) == (2, 28 + 32)


# ------------------------------------------------------------ no false cause


def test_hundreds_of_clean_turns_have_no_false_cause(client: Client) -> None:
    """`make torture` takes 500. Chats that only grow, in any order: each new message, and nothing else, is new."""
    dice = random.Random(7)
    words = [
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "a",
        "lazy",
        "dog",
        "and",
        "3",
        "bears",
        "at",
        "10:42",
        "on",
        "2026-11-22",
        "(of",
        "17)",
    ]

    def text(most: int) -> str:
        return " ".join(dice.choice(words) for _ in range(dice.randint(2, most))) + dice.choice(
            "?.!"
        )

    chats: list[list[dict[str, Any]]] = [[SYSTEM] for _ in range(CLEAN_TURNS // 8)]
    for turn in range(CLEAN_TURNS):
        chat = dice.choice(chats)
        if len(chat) > 24:
            chat[:] = [SYSTEM]
        chat.append(user(text(9)))
        answer = text(8)
        answer_with(client.server, answer)
        body = client.chat(*chat, seed=turn)
        explained = body["cache_explanation"]
        assert explained["cause"] in ("none", "never_seen"), (chat, explained)
        if explained["cause"] == "never_seen" and len(chat) > 2:
            place = explained["divergence"]
            assert (place["message_index"], place["role"]) == (len(chat) - 1, "user")
        assert body["choices"][0]["message"]["content"] == answer
        chat.append(assistant(answer))


# ------------------------------------------------------------ keys


def test_a_key_never_sees_another_keys_text(client: Client) -> None:
    secret = SYSTEM, user("The secret of alice: the fox sleeps at noon.")
    id_of_alice = client.chat(*secret)["id"]
    bob = Client(client.server, "bob")
    explained = bob.chat(SYSTEM, user("The secret of alice:"))["cache_explanation"]
    assert (explained["cause"], explained["cached_tokens"]) == ("never_seen", 0)
    assert explained["divergence"]["cached_text"] == "" and "noon" not in json.dumps(explained)
    assert bob.get(f"/v1/cache/explain/{id_of_alice}").status_code == 404
    assert client.get(f"/v1/cache/explain/{id_of_alice}").status_code == 200


def test_keys_that_share_a_cache_share_no_texts(client: Client) -> None:
    bob, carol = Client(client.server, "bob"), Client(client.server, "carol")
    bob.chat(SYSTEM, user("The fox of bob sleeps at noon."))
    carol.sequences = bob.sequences
    shared = carol.chat(SYSTEM, user("The bear of carol."), note=False)["cache_explanation"]
    assert shared["cached_tokens"] > 0 and "noon" not in json.dumps(shared)
    assert shared["divergence"]["cached_text"] is None
    Client(client.server, "root").post("/flush_cache", {})
    bob.sequences = []
    bob.chat(SYSTEM, user("The dog of bob is salted."), cache_salt="bobs", note=False)
    carol.sequences = []
    salted = carol.chat(SYSTEM, user("The dog of bob is salted."), cache_salt="carols")
    assert salted["cache_explanation"]["cause"] == "never_seen"


def test_clients_without_a_key_see_no_texts_from_afar(start_server: StartServer) -> None:
    """All of them are one tenant; the client on this machine is an admin, and one behind a proxy is
    not."""
    server = start_server(
        info=engine_info(page_size=PAGE, kv_pool_tokens=2048), scheduler_type=RealScheduler
    )
    body = {"messages": [user("The fox sleeps at noon.")], "max_tokens": 2, "cache": {"explain": True}}  # fmt: skip
    client = Client(server)
    client.post("/v1/chat/completions", body)
    body["messages"] = [user("The fox sleeps at midnight.")]
    far = client.post(
        "/v1/chat/completions", body | {"rid": "far"}, **{"x-forwarded-for": "10.1.2.3"}
    )
    place = far["cache_explanation"]["divergence"]
    assert place["token_index"] > 0 and (place["prompt_text"], place["cached_text"]) == (None, None)
    body["messages"] = [user("The fox sleeps at dawn.")]
    near = client.post("/v1/chat/completions", body)["cache_explanation"]
    assert (
        "at noon" in near["divergence"]["cached_text"]
        or "midnight" in near["divergence"]["cached_text"]
    )


def test_texts_may_be_hidden_from_everybody(start_server: StartServer) -> None:
    server = start_server(
        info=engine_info(page_size=PAGE, kv_pool_tokens=2048),
        scheduler_type=RealScheduler,
        hide_cache_texts=True,
    )
    body = {"messages": [user("The fox sleeps at noon.")], "max_tokens": 2, "cache": {"explain": True}}  # fmt: skip
    answer = Client(server).post("/v1/chat/completions", body)
    assert answer["cache_explanation"]["divergence"]["prompt_text"] is None


# ------------------------------------------------------------ every endpoint


CHAT = {"messages": [user("Hello, fox.")], "max_tokens": 4}
ENDPOINTS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, "id"),
    ("/v1/completions", {"prompt": "Hello, fox, how are you?", "max_tokens": 4}, "id"),
    ("/v1/responses", {"input": "Hello, fox.", "max_output_tokens": 4}, "id"),
    ("/v1/messages", CHAT, "id"),
    ("/api/chat", {"model": "tiny", "messages": CHAT["messages"]}, ""),
]


@pytest.mark.parametrize("asked_by", ["body", "header"])
@pytest.mark.parametrize(("path", "body", "id_field"), ENDPOINTS)
def test_every_endpoint_explains(
    client: Client, path: str, body: dict[str, Any], id_field: str, asked_by: str
) -> None:
    if asked_by == "body":
        body, headers = body | {"cache": {"explain": True}}, {}
    else:
        headers = {"x-radixrt-explain-cache": "1"}
    whole = client.post(path, body | {"stream": False}, **headers)
    explained = whole["cache_explanation"]
    assert msgspec.convert(explained, CacheExplanation).cause == "never_seen"
    if id_field:
        asked_afterwards = client.get(f"/v1/cache/explain/{whole[id_field]}").json()
        assert asked_afterwards == explained | {"request_id": whole[id_field]}
    lines = streamed(client, path, body | {"stream": True}, headers)
    told = [line for line in lines if "cache_explanation" in line or "cache_explanation" in line.get("response", {})]  # fmt: skip
    assert len(told) == 1
    last = told[0].get("response", told[0])
    assert "usage" in last or path == "/api/chat"
    assert last["cache_explanation"]["cached_tokens"] > 0
    assert "cache_explanation" not in client.post(path, {k: v for k, v in body.items() if k != "cache"} | {"stream": False})  # fmt: skip


@pytest.mark.parametrize(("path", "body", "id_field"), ENDPOINTS)
def test_a_header_names_the_session_whose_requests_are_explained_together(
    client: Client, path: str, body: dict[str, Any], id_field: str
) -> None:
    session = f"launch {path}"
    for _ in range(2):
        client.post(path, body | {"stream": False}, **{"x-radixrt-session": session})
    client.post(path, body | {"stream": False})
    if "prompt" not in body:  # /v1/messages keeps to the session that its body names
        client.post(path, body | {"stream": False, "cache": {"session": "other"}}, **{"x-radixrt-session": session})  # fmt: skip
    asked = client.http.get("/v1/cache/explain", params={"session": session})
    first, second = msgspec.convert(asked.json()["requests"], list[CacheExplanation])
    assert (first.cause, first.cached_tokens) == ("never_seen", 0)
    assert second.cached_tokens > 0 and second.missed_tokens < PAGE + 1
    bob = Client(client.server, "bob")
    assert bob.http.get("/v1/cache/explain", params={"session": session}).json()["requests"] == []


def test_explanations_of_a_session_need_its_name(client: Client) -> None:
    for query in ("", "?session=", f"?session={'x' * 257}"):
        assert client.get(f"/v1/cache/explain{query}").status_code in (400, 422)


def streamed(client: Client, path: str, body: dict[str, Any], headers: dict[str, str]) -> list[Any]:
    response = client.http.post(path, json=body, headers=headers)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_the_native_endpoint_explains_each_result(client: Client) -> None:
    body = {"text": ["Hello, fox, how are you?", "Hello, dog, how are you?"], "cache": {"explain": True}}  # fmt: skip
    results = client.post("/generate", body | {"sampling_params": {"max_new_tokens": 3}})
    for result in results:
        explained = result["meta_info"]["cache_explanation"]
        again = client.get(f"/v1/cache/explain/{result['meta_info']['id']}").json()
        assert again == explained and explained["cause"] in ("never_seen", "page_rounding")


def test_an_unknown_request_is_not_found(client: Client) -> None:
    found = client.get("/v1/cache/explain/nothing")
    assert found.status_code == 404 and "unknown" in found.json()["error"]["message"]
