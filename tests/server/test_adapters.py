"""Adapters of a real server: in every API, loaded and unloaded under traffic, and after the death of
a worker."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import radixrt.lang as rl
import radixrt_kernels
from tests.adapters.peft_adapters import config_of, make_adapter
from tests.servers import Server

pytestmark = pytest.mark.skipif(
    not radixrt_kernels.available(), reason="adapters are computed by the native kernels"
)

PROMPT = "The cat sat on the mat and the dog"
THOROUGH = "RADIXRT_ADAPTERS" in os.environ
CYCLES = int(os.environ.get("RADIXRT_ADAPTERS", "4"))
"""Loads and unloads; ``make adapters`` has 100."""
NAMES = ["one", "two", "three"]


@pytest.fixture(scope="module")
def folders(served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for seed, folder in enumerate(made.values()):
        config = config_of("all_linear", "llama")
        make_adapter(served_checkpoint, folder, config, seed=seed, size=0.4)
    return made


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], folders: dict[str, Path]) -> Server:
    loras = [f"{name}={folders[name]}" for name in NAMES[:2]]
    names = ("--served-model-name", "tiny,lib/tiny:Q4_0")
    return start_server(*names, "--lora", *loras, "--max-loras", "4", "--page-size", "4")


def post(server: Server, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def complete(server: Server, model: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}
    return post(server, "/v1/completions", body)


def text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["text"]


def load(server: Server, name: str, folder: Path, status: int = 200, **fields: Any) -> Any:
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    return post(server, "/v1/load_lora_adapter", body, status)


def unload(server: Server, name: str, status: int = 200) -> Any:
    return post(server, "/v1/unload_lora_adapter", {"lora_name": name}, status)


CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 12}
DIALECTS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "/v1/completions": (
        {"prompt": PROMPT, "temperature": 0, "max_tokens": 12},
        lambda answer: answer["choices"][0]["text"],
    ),
    "/v1/chat/completions": (CHAT, lambda answer: answer["choices"][0]["message"]["content"]),
    "/v1/messages": (CHAT, lambda answer: answer["content"]),
    "/v1/responses": (
        {"input": PROMPT, "temperature": 0, "max_output_tokens": 16},
        lambda answer: answer["output"][-1]["content"],
    ),
    "/api/generate": (
        {"prompt": PROMPT, "stream": False, "options": {"temperature": 0, "num_predict": 12}},
        lambda answer: answer["response"],
    ),
    "/api/chat": (
        {**CHAT, "stream": False, "options": {"temperature": 0, "num_predict": 12}},
        lambda answer: answer["message"]["content"],
    ),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_every_api_takes_an_adapter_as_its_model(server: Server, path: str) -> None:
    body, read = DIALECTS[path]
    answers = {
        name: post(server, path, body | {"model": name})
        for name in ("tiny", "one", "two", "tiny:one", "lib/tiny:Q4_0:one")
    }
    texts = {name: str(read(answer)) for name, answer in answers.items()}
    assert texts["one"] == texts["tiny:one"] == texts["lib/tiny:Q4_0:one"]
    assert len({texts["tiny"], texts["one"], texts["two"]}) == 3
    assert "not served here" in str(post(server, path, body | {"model": "none"}, 404))
    assert [answers[name]["model"] for name in ("tiny", "one", "tiny:one")] == ["tiny", "one", "one"]  # fmt: skip


def test_the_native_api_takes_an_adapter_as_its_model(server: Server) -> None:
    def answer(**fields: Any) -> str:
        sampling = {"temperature": 0, "max_new_tokens": 16}
        return post(server, "/generate", {"text": PROMPT, "sampling_params": sampling, **fields})["text"]  # fmt: skip

    for name in ("tiny", "one"):
        assert answer(model=name) == text(complete(server, name))
    assert answer() == answer(model="tiny") != answer(model="one")
    post(server, "/generate", {"text": PROMPT, "model": "none"}, 404)


def test_the_chat_in_a_terminal_asks_the_adapter(
    server: Server, folders: dict[str, Path], served_checkpoint: Path
) -> None:
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        given = [
            str(served_checkpoint),
            "--port",
            server.url.rpartition(":")[2],
            "--lora",
            f"one={folder}",
        ]
        command = ["run", *given, "-p", PROMPT, "--temperature", "0", "--max-tokens", "12"]
        return subprocess.run(
            [sys.executable, "-m", "radixrt.cli", *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    body, read = DIALECTS["/v1/chat/completions"]
    expected = read(post(server, "/v1/chat/completions", body | {"model": "one"}))
    answered = run(folders["one"])
    assert answered.stdout.strip() == expected.strip(), answered.stderr
    refused = run(folders["three"])
    assert refused.returncode == 1 and "without the adapter" in refused.stderr, refused.stderr


def test_programs_have_an_adapter_for_each_call(server: Server) -> None:
    def program(s: Any, *adapters: str | None) -> Any:
        for number, adapter in enumerate(adapters):
            s += PROMPT + rl.gen(f"{number}", 12, 0, adapter=adapter)
            s += rl.select(f"choice {number}", ["a", "b"], adapter=adapter)
        return s

    backend = rl.Server(server.url)
    names = [None, "one", "two"]
    states = [rl.function(program).run(name, backend=backend) for name in names]
    found = {name: state["0"] for name, state in zip(names, states, strict=True)}
    for name in names:
        assert found[name] == text(complete(server, name or "tiny", max_tokens=12))
    mixed = rl.function(program).run("one", None, backend=backend)
    assert mixed["0"] == found["one"] and mixed["1"]
    with pytest.raises(rl.BadRequest, match="not served here"):
        _ = rl.function(program).run("seven", backend=backend)["0"]


def test_models_lists_the_adapters(server: Server, folders: dict[str, Path]) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    found = {entry["id"]: entry for entry in listed}
    assert "parent" not in found["tiny"] and found["one"]["parent"] == "tiny"
    assert len(found["one"]["digest"]) == 64 and found["one"]["root"] == str(folders["one"])
    assert httpx.get(f"{server.url}/v1/models/one").json() == found["one"]
    assert httpx.get(f"{server.url}/v1/models/four").status_code == 404
    of_ollama = httpx.get(f"{server.url}/api/tags").json()["models"]
    assert {one["name"]: one["digest"] for one in of_ollama[1:]} == {
        name: found[name]["digest"] for name in NAMES[:2]
    }
    assert {one["details"]["parent_model"] for one in of_ollama[1:]} == {"tiny"}


def test_nothing_is_cached_across_names_salts_and_digests(server: Server) -> None:
    def cached(model: str, **fields: Any) -> int:
        usage = complete(server, model, "A prompt that nobody else has sent.", **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    digest = httpx.get(f"{server.url}/v1/models/one").json()["digest"]
    assert cached("one") == 0 and cached("one") > 0
    salts = ["one", digest, f"\x00{digest}", "tiny:one"]
    assert [cached("tiny", cache_salt=salt) for salt in salts] == [0] * 4
    assert cached("tiny") == cached("two") == 0


def test_a_load_that_cannot_be_served_says_why(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    error = load(server, "four", tmp_path / "none", status=400)["error"]
    assert "no such folder or file" in error["message"] and error["param"] == "lora_path"
    (tmp_path / "empty").mkdir()
    empty = load(server, "four", tmp_path / "empty", status=400)["error"]["message"]
    assert "adapter_config.json" in empty
    shutil.copytree(folders["one"], tmp_path / "dora")
    config = json.loads((tmp_path / "dora/adapter_config.json").read_text())
    (tmp_path / "dora/adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert "DoRA" in load(server, "four", tmp_path / "dora", status=400)["error"]["message"]
    assert "load_inplace" in load(server, "one", folders["one"], status=400)["error"]["message"]
    load(server, "tiny", folders["one"], status=400)
    for name in ("two\nlines", "\x1b[31m", "n" * 257):
        message = load(server, name, folders["three"], status=400)["error"]["message"]
        assert "printable" in message
    unload(server, "four", status=404)
    for name in ("a", "b"):
        load(server, name, _another(folders["one"], tmp_path, name))
    full = load(server, "c", folders["three"], status=409)["error"]["message"]
    assert "--max-loras" in full
    for name in ("a", "b"):
        unload(server, name)


def test_of_loads_of_one_name_at_a_time_one_is_served(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The others take nothing back."""
    files = [_another(folders["one"], tmp_path, name) for name in "pqrstuvw"]
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(8) as threads:

        def ask(folder: Path) -> int:
            body = {"lora_name": "twice", "lora_path": str(folder)}
            return client.post(f"{server.url}/v1/load_lora_adapter", json=body).status_code

        assert sorted(threads.map(ask, files)) == [200, *[400] * 7]
    assert complete(server, "twice")["model"] == "twice"
    unload(server, "twice")


def _another(folder: Path, under: Path, name: str) -> Path:
    """An adapter with another scaling."""
    copy = shutil.copytree(folder, under / name)
    config = json.loads((copy / "adapter_config.json").read_text())
    scaled = config | {"lora_alpha": config["lora_alpha"] + ord(name)}
    (copy / "adapter_config.json").write_text(json.dumps(scaled))
    return copy


@pytest.fixture
def traffic(server: Server) -> Iterator[list[str]]:
    """Answers of the base and an adapter, of 2 threads until the test ends; errors among them."""
    found: list[str] = []
    stops = False

    def ask(number: int) -> None:
        while not stops:
            model = ("tiny", "one")[number % 2]
            try:
                found.append(f"{model}: {text(complete(server, model))}")
            except AssertionError as error:
                found.append(f"failed: {error}")

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(ask, number) for number in range(2)]
        yield found
        stops = True
        for one in running:
            one.result()


def test_a_name_is_given_to_other_bytes_under_16_streams(
    server: Server, folders: dict[str, Path]
) -> None:
    """Each stream is an answer of one adapter, and nothing of the other's KV is used."""
    load(server, "hot", folders["one"])
    load(server, "check", folders["three"])
    prompts = [f"{number} {PROMPT}" for number in range(16)]
    fields = {"max_tokens": 30, "ignore_eos": True}
    old = [text(complete(server, "one", prompt, **fields)) for prompt in prompts]
    new = [text(complete(server, "check", prompt, **fields)) for prompt in prompts]
    unload(server, "check")
    with ThreadPoolExecutor(17) as threads:
        asked = [threads.submit(complete, server, "hot", prompt, **fields) for prompt in prompts]
        time.sleep(0.1)
        load(server, "hot", folders["three"], load_inplace=True)
        texts = [text(answer.result()) for answer in asked]
    for found, before, after in zip(texts, old, new, strict=True):
        assert found in (before, after)
    again = [text(complete(server, "hot", prompt, **fields)) for prompt in prompts[:4]]
    assert again == new[:4]
    unload(server, "hot")


def test_cycles_of_load_and_unload_under_traffic(
    server: Server, folders: dict[str, Path], traffic: list[str]
) -> None:

    def memory() -> int:
        return sum(process.memory_info().rss for process in server.family())

    expected: set[str] = set()
    sizes = []
    for number in range(CYCLES):
        load(server, "hot", folders["three"])
        expected.add(text(complete(server, "hot")))
        unload(server, "hot")
        complete_of_gone = {"model": "hot", "prompt": PROMPT}
        post(server, "/v1/completions", complete_of_gone, status=404)
        if number % (CYCLES // 2) == CYCLES // 2 - 1:
            sizes.append(memory())
    assert len(expected) == 1
    assert len(traffic) > 4 and len(set(traffic)) == 2, set(traffic)
    assert sizes[-1] < sizes[0] * 1.05
    assert server.info(check_invariants=True)


def test_a_worker_dies_and_its_adapters_are_there_again(
    server: Server, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Also one that was loaded later, and the answers under way go on with the same tokens. An
    adapter whose files are gone is named to all who ask for it."""
    load(server, "hot", folders["three"])
    files = _another(folders["three"], tmp_path, "z")
    load(server, "lost", files)
    fields = {"max_tokens": 300, "ignore_eos": True}
    expected = {name: text(complete(server, name, **fields)) for name in ("one", "hot", "tiny")}
    lost = {"model": "lost", "prompt": PROMPT}
    with ThreadPoolExecutor(4) as threads:
        asked = {name: threads.submit(complete, server, name, cache_salt="new", **fields) for name in expected}  # fmt: skip
        time.sleep(0.15)
        (worker,) = [p for p in server.family() if "radixrt.worker" in " ".join(_command(p))]
        worker.suspend()
        refused = threads.submit(post, server, "/v1/completions", lost, 503)
        time.sleep(0.2)
        files.rename(tmp_path / "away")
        worker.kill()
        assert {name: text(answer.result()) for name, answer in asked.items()} == expected
        assert "lost" in refused.result()["error"]["message"]
    for name, whole in expected.items():
        assert whole.startswith(text(complete(server, name, max_tokens=12, ignore_eos=True)))
    for model in ("lost", "tiny:lost"):
        assert "lost" in post(server, "/v1/chat/completions", CHAT | {"model": model}, 503)["error"]["message"]  # fmt: skip
    load(server, "lost", tmp_path / "away")
    assert complete(server, "lost")["model"] == "lost"
    unload(server, "lost")
    post(server, "/v1/completions", lost, status=404)
    unload(server, "hot")


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.skipif(not THOROUGH, reason="make adapters: it starts two servers")
@pytest.mark.parametrize("flags", [("--tp", "2"), ("--dp", "2")], ids=str)
def test_ranks_and_replicas_answer_as_one(
    server: Server,
    start_server: Callable[..., Server],
    folders: dict[str, Path],
    flags: tuple[str, str],
) -> None:
    other = start_server(*flags, "--lora", f"one={folders['one']}", "--max-loras", "3")
    load(other, "three", folders["three"])
    load(server, "three", folders["three"])
    prompts = [f"{number} {PROMPT}" for number in range(2)]
    for name in ("one", "three", "tiny"):
        for prompt in prompts:
            assert text(complete(other, name, prompt)) == text(complete(server, name, prompt))
    unload(other, "three")
    post(other, "/v1/completions", {"model": "three", "prompt": PROMPT}, status=404)
    unload(server, "three")
    other.stop()
