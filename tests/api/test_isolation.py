"""Every route with a body puts its prompts into the cache namespace of its caller: the walk knows
all routes of the app."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from radixrt.api.http.endpoints import Endpoints
from radixrt.api.requests.protocol import RequestBody
from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.messages.calls import PinCall
from radixrt.messages.requests import PoolingInfo
from radixrt.tokenizer.prompt.prompts import PromptEncoder
from tests.api.conftest import RunningServer, StartServer
from tests.api.test_keys import http, key_file, routes
from tests.checkpoints.tiny_tokenizers import CHATML, save_byte_level
from tests.servers.fake_scheduler import engine_info
from tests.tokenizer.test_fill_in_middle import QWEN

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
GENERATES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 4},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses": {"input": "hi"},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "hi"},
    "/generate": {"text": "hi"},
    "/infill": {"input_prefix": "hi", "input_suffix": "!"},
    "/score_choices": {"prompt": "hi", "choices": ["a", "b"]},
    "/tokenize": CHAT,
    "/rerank": {"query": "hi", "documents": ["a"]},
    "/v1/rerank": {"query": "hi", "documents": ["a"]},
    "/v2/rerank": {"query": "hi", "documents": ["a"]},
    "/score": {"text_1": "hi", "text_2": "a"},
    "/v1/score": {"text_1": "hi", "text_2": "a"},
    "/v1/cache/warm": {"prompt": "hi"},
    "/v1/cache/pin": {"prompt": "hi"},
    "/v1/cache/match": {"prompts": ["hi"]},
}
EMBEDS = {
    "/v1/embeddings": {"input": "hi"},
    "/api/embed": {"input": "hi"},
    "/api/embeddings": {"prompt": "hi"},
}
CLASSIFIES = {"/classify": {"input": "hi"}}
WITHOUT_PROMPT = {
    "/v1/conversations",  # kept in the api process, under a digest of the caller and the salt
    "/v1/prompts",  # likewise; tests/api/test_pieces.py has the salts of what is computed ahead
    "/v1/prompts/{prompt_id}",
    "/v1/prompts/{prompt_id}/commit",
    "/v1/cache/release",
    "/v1/grammar/compile",
    "/v1/replicas/drain",
    "/v1/replicas/start",
    "/api/pull",
    "/api/show",
    "/detokenize",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
WITHOUT_BODY = {"/abort_request", "/flush_cache", "/ping"}
SALTS = ["", "mine", "key:bob\0", "\0key:bob\0mine", "group:friends\0"]


def test_the_walk_knows_every_route_that_takes_a_body() -> None:
    known = GENERATES.keys() | EMBEDS.keys() | CLASSIFIES.keys() | WITHOUT_PROMPT | WITHOUT_BODY
    assert {path for method, path in routes() if method == "POST"} == known
    assert {method for method, _ in routes()} == {"GET", "HEAD", "POST", "DELETE"}


@pytest.fixture(scope="module")
def encoded() -> Iterator[list[str]]:
    """The salts of all prompts that any tokenizer process encodes."""
    roots: list[CacheRoot] = []
    encode = PromptEncoder.encode

    def noting(self: PromptEncoder, prompt: Any, limits: Any, root: CacheRoot = BASE_ROOT) -> Any:
        roots.append(root)
        return encode(self, prompt, limits, root)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptEncoder, "encode", noting)
        yield roots


@pytest.fixture(scope="module")
def servers(
    start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, RunningServer]:
    """The server with keys of each path."""
    keys = str(key_file(tmp_path_factory.mktemp("keys")))
    model = save_byte_level(tmp_path_factory.mktemp("coder"), CHATML, special_tokens=QWEN)
    served: dict[str, RunningServer] = {}
    for paths, changes in (
        (GENERATES, {"score_tokens": (310, 311)}),
        (EMBEDS, {"pooling": PoolingInfo(task="embed", size=2, normalized=True)}),
        (CLASSIFIES, {"pooling": PoolingInfo(task="classify", size=2, labels=("a", "b"))}),
    ):
        server = start_server(info=engine_info(**changes), model=model, api_keys=keys)
        served |= dict.fromkeys(paths, server)
    return served


@pytest.mark.parametrize("path", [*GENERATES, *EMBEDS, *CLASSIFIES])
def test_no_request_shares_kv_or_encoded_text_with_another_key_or_salt(
    servers: dict[str, RunningServer], encoded: list[str], path: str
) -> None:
    body: dict[str, Any] = (GENERATES | EMBEDS | CLASSIFIES)[path]
    scheduler = servers[path].scheduler
    scheduler.vector = lambda request: (2.0, 1.0)
    servers[path].answer_with("Hello")
    for name, namespace in (("alice", "key:alice"), ("carol", "group:friends")):
        with http(servers[path], name) as client:
            for salt in SALTS[path == "/v1/cache/match" :]:  # which needs one
                for seen in (encoded, scheduler.requests, scheduler.cache_calls):
                    seen.clear()
                response = client.post(path, json=body | {"cache_salt": salt})
                assert response.status_code == 200, response.text
                found = set(encoded)
                for request in scheduler.requests:
                    found.add(request.options.root)
                    assert request.options.tenant.name == name
                for call in scheduler.cache_calls:
                    found.add(call.root)
                    assert not isinstance(call, PinCall) or call.tenant.name == name
                assert found == {CacheRoot(namespace, salt)}


def test_a_body_without_a_salt_is_no_body_of_a_route() -> None:
    class Prompts(msgspec.Struct):
        prompt: str

    class Salted(RequestBody):
        prompt: str

    router = Endpoints()
    with pytest.raises(TypeError, match="RequestBody"):
        router.takes("/new", Prompts)  # type: ignore[type-var]
    router.takes("/new", Salted)
