"""Health, information, metrics and the API key."""

import json
import re
import shlex
import subprocess
import sys

import httpx
import openai
import pytest

from radixrt.cli.main import _parsed
from tests.api.conftest import RunningServer, StartServer
from tests.servers import samples


def test_the_model_is_listed(server: RunningServer) -> None:
    assert [m.id for m in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny").id == "tiny"


def test_health_is_told_and_health_generate_really_generates(server: RunningServer) -> None:
    with server.http as http:
        assert http.get("/health").status_code == 200
        assert server.scheduler.requests == []
        assert http.get("/health_generate").status_code == 200
    assert [r.sampling.max_tokens for r in server.scheduler.requests] == [1]


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_a_probe_may_ask_for_headers_alone(server: RunningServer, path: str) -> None:
    with server.http as http:
        assert http.head(path).status_code == 200


def test_other_servers_names_of_the_same_endpoints_are_known(server: RunningServer) -> None:
    with server.http as http:
        assert http.get("/model_info").json() == http.get("/get_model_info").json()
        assert http.get("/server_info").json()["version"] == http.get("/version").json()["version"]
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_names_its_request(server: RunningServer, path: str, stream: bool) -> None:
    prompt = {"prompt": "hi", "text": "hi", "messages": [{"role": "user", "content": "hi"}]}
    with server.http as http:
        answer = http.post(path, json=prompt | {"rid": "mine", "stream": stream})
        assert answer.headers["x-request-id"] == "mine" and '"id":"mine"' in answer.text
        refused = http.post(path, json={})
        assert refused.status_code == 400 and refused.headers["x-request-id"]


def test_information_about_model_and_server(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    headers = {"Authorization": "Bearer secret"}
    with server.http as http:
        model = http.get("/get_model_info", headers=headers).json()
        info = http.get("/get_server_info?check_invariants=true", headers=headers).json()
    assert model["context_length"] == 512 and model["architecture"] == "FakeForCausalLM"
    assert info["invariants"] == "ok"
    assert info["settings"]["page_size"] == 16 and "secret" not in str(info)
    assert info["stats"]["pages_total"] == 128


def test_the_root_lists_the_endpoints(server: RunningServer) -> None:
    with server.http as http:
        endpoints = http.get("/").json()["endpoints"]
        assert {"/v1/chat/completions", "/generate", "/metrics"} <= set(endpoints)
        description = http.get("/openapi.json").json()
    chat = description["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert chat["content"]["application/json"]["schema"]["$ref"].endswith("ChatCompletionRequest")
    assert "messages" in description["components"]["schemas"]["ChatCompletionRequest"]["required"]


def test_curl_gets_the_models_name_and_three_commands_that_work(server: RunningServer) -> None:
    with server.http as http:
        for agent in ("curl/8.5.0", "Wget/1.21"):
            text = http.get("/", headers={"user-agent": agent}).text
            assert f"serves tiny. The page for browsers is {server.url}/" in text
        asked = http.get("/", headers={"user-agent": "curl/8.5.0", "accept": "application/json"})
        assert asked.json()["model"] == "tiny"
    curl, chat, top = (
        re.sub(r"\\\n\s+", "", text).split("\n\n")[1].replace("  ", "").strip().splitlines()
    )
    assert (chat, top) == (f"radixrt chat --url {server.url}", f"radixrt top --url {server.url}")
    for line in (chat, top):
        _parsed(shlex.split(line)[1:])
    program, url, _, _, _, body = shlex.split(curl)
    assert program == "curl" and httpx.post(url, json=json.loads(body)).status_code == 200


def test_an_overflow_is_in_the_words_that_langchain_looks_for(server: RunningServer) -> None:
    """openai's ``str(error)`` has the message and not the code."""
    with pytest.raises(openai.BadRequestError) as refusal:
        server.openai.completions.create(model="tiny", prompt="long " * 2000)
    assert refusal.value.code == "context_length_exceeded"
    assert "prompt is too long" in str(refusal.value)
    assert "maximum context length" in refusal.value.body["message"]  # type: ignore[index]


def test_the_cache_can_be_flushed(server: RunningServer) -> None:
    before = server.scheduler.flushes
    with server.http as http:
        assert http.post("/flush_cache").json() == {"success": True, "pages_freed": 3}
    assert server.scheduler.flushes == before + 1


def test_metrics_count_what_happened(start_server: StartServer) -> None:
    server = start_server()
    server.answer_with("Hello world")
    tokens = len(server.vocabulary.encode("Hello world", False)) + 1
    list(server.openai.completions.create(model="tiny", prompt="hi", stream=True))
    server.openai.completions.create(model="tiny", prompt="hi")
    with server.http as http:
        values = samples(http.get("/metrics").text)
    assert values["radixrt_time_to_first_token_seconds_count", ()] == 2
    assert values["radixrt_inter_token_latency_seconds_count", ()] == tokens - 1
    assert values["radixrt_e2e_request_latency_seconds_count", ()] == 2
    assert values["radixrt_answers_total", (("outcome", "stop"),)] == 2
    assert values["radixrt_cache_hit_rate", ()] == 0.4
    assert values["radixrt_step_seconds_bucket", (("le", "0.01"),)] == 3
    assert values["radixrt_kv_pages_free", ()] == 1
    assert values["radixrt_request_prompt_tokens_count", ()] == 2
    assert values["radixrt_request_generation_tokens_sum", ()] == 2 * tokens
    assert values["radixrt_request_decode_time_seconds_count", ()] == 2


@pytest.mark.parametrize("bad", ["", "the " * 600])
def test_a_batch_with_a_bad_prompt_is_one_error(start_server: StartServer, bad: str) -> None:
    server = start_server()
    server.answer_endlessly()
    with server.http as http:
        body = {"prompt": ["good"] * 40 + [bad] + ["good"] * 40, "max_tokens": 400}
        assert http.post("/v1/completions", json=body).status_code == 400
        text = http.get("/metrics").text
    outcomes = {
        labels: value
        for (name, labels), value in samples(text).items()
        if name == "radixrt_answers_total"
    }
    assert outcomes[(("outcome", "error"),)] == 1
    assert (("outcome", "client_left"),) not in outcomes


def test_without_the_key_only_health_is_open(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    server.answer_with("Hello")
    with server.http as http:
        for path in ("/health", "/ping", "/ready"):
            assert http.get(path).status_code == 200
        assert http.get("/metrics").status_code == 401
        for key in (None, "Bearer wrong", "secret", "Bearer secretly", "Bearer \xff"):
            headers = {} if key is None else {"Authorization": key.encode("latin-1")}
            response = http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("Bearer", "bearer", "BEARER"):
            headers = {"Authorization": f"{scheme} secret"}
            assert http.get("/v1/models", headers=headers).status_code == 200
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret")
    assert client.completions.create(model="tiny", prompt="hi").choices[0].text == "Hello"


@pytest.mark.parametrize("module", ["radixrt.api.server", "radixrt.client.engine_client"])
def test_the_api_process_starts_without_the_heavy_libraries(module: str) -> None:
    """Tracing's library comes with its setting."""
    code = f"import {module}, sys; print([m for m in ('torch', 'transformers', 'tokenizers', 'opentelemetry.sdk') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_wrong_base_url_is_told(server: RunningServer) -> None:
    with server.http as http:
        for path, advice in (
            ("/chat/completions", "add /v1"),
            ("/messages", "add /v1"),
            ("/v1/v1/messages", "leave /v1 out"),
            ("/v1/api/chat", "leave /v1 out"),
            ("/v1/nothing", "lists the endpoints"),
        ):
            response = http.post(path, json={})
            assert response.status_code == 404 and advice in response.text


def test_head_is_where_get_is(server: RunningServer) -> None:
    with server.http as http:
        for path in ("/", "/v1/models", "/metrics", "/api/tags", "/health"):
            response = http.head(path)
            assert (response.status_code, response.content) == (200, b"")


def test_metrics_come_in_the_format_that_is_asked_for(server: RunningServer) -> None:
    with server.http as http:
        plain = http.get("/metrics")
        asked = http.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    assert plain.headers["content-type"].startswith("text/plain")
    assert asked.headers["content-type"].startswith("application/openmetrics-text")
    assert asked.text.endswith("# EOF\n")


def test_a_model_may_have_several_names(start_server: StartServer) -> None:
    server = start_server(served_model_name="tiny other/name")
    server.answer_with("Hello")
    assert [model.id for model in server.openai.models.list()] == ["tiny", "other/name"]
    for name in ("tiny", "other/name"):
        answer = server.openai.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.model == "tiny" and answer.system_fingerprint.startswith("fp_")


def test_what_clients_of_other_servers_ask(server: RunningServer) -> None:
    with server.http as http:
        assert http.get("/load").json() == {"server_load": 0}
        assert http.get("/props").json()["default_generation_settings"]["n_ctx"] == 512
        assert "chat_template" in http.get("/tokenizer_info").json()
