"""A server whose KV outlives it: everything is killed at random moments under load, and the next
server has what was on disk, bit for bit.

``RADIXRT_CACHE_KILLS`` says how often; ``make test-cache-dir`` does it fifty times. In every second
round one process alone is killed before.
"""

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import radixrt_kernels
from radixrt.base.config import DEMO_MODEL
from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import resolve_model_path
from tests.api.conftest import RunningServer
from tests.engine.in_process import InProcessEngine
from tests.servers import Server, run_server, serving
from tests.servers.servers_in_process import serving_in_process

KILLS = int(os.environ.get("RADIXRT_CACHE_KILLS", "1"))
CLIENTS = int(os.environ.get("RADIXRT_CACHE_CLIENTS", "8"))
DOCUMENTS = [[(11 * d + 3 * i) % 400 + 5 for i in range(150 + 40 * d)] for d in range(8)]
SAMPLING = {"temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}

Result = tuple[list[int], list[Any]]


def generate(server: Server | RunningServer, prompts: Any, **fields: Any) -> Any:
    body = {"input_ids": prompts, "sampling_params": SAMPLING, "return_logprob": True} | fields
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def bits(answer: dict[str, Any]) -> Result:
    """Tokens and log-probabilities of an answer."""
    return answer["output_ids"], [one[0] for one in answer["meta_info"]["output_token_logprobs"]]


def stats(server: Server | RunningServer) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/cache/stats", timeout=30).json()


def kill_one(server: Server, name: str) -> None:
    """Kill the process of a name."""
    (one,) = [one for one in server.family() if f"radixrt.{name}" in " ".join(one.cmdline())]
    one.kill()


def kill_everything(server: Server) -> None:
    for process in [*server.family(), server.process]:
        with contextlib.suppress(ProcessLookupError):  # it has followed another one
            os.kill(process.pid, signal.SIGKILL)
    server.process.wait()
    server.remove()


@pytest.fixture(scope="module")
def cold(demo_server: Server) -> list[Result]:
    """Of a server without a cache on disk, which has not seen the documents."""
    return [bits(answer) for answer in generate(demo_server, DOCUMENTS)]


def ask_until(server: Server, stop: threading.Event, rng: random.Random, cold: list[Result], wrong: list[str]) -> None:  # fmt: skip
    """A client: asks about random documents until the server is gone."""
    while not stop.is_set():
        number = rng.randrange(len(DOCUMENTS))
        try:
            answer = generate(server, DOCUMENTS[number])
        except (httpx.HTTPError, AssertionError) as error:
            if not stop.is_set():
                wrong.append(repr(error))
            return
        if bits(answer) != cold[number]:
            wrong.append(f"another answer to document {number}")


@dataclass
class Kept:
    """A server, and what was found on the disk that killed servers have left."""

    server: Server
    folder: Path
    found: int = 0
    """Tokens that were read from disk."""
    kept: int = 0
    """Tokens that were on disk."""

    def find(self, server: Server, kind: str = "disk_tokens") -> list[Result]:
        """The answers of a server that has just begun, or where one process has."""
        self.kept += 16 * stats(server)["disk_pages"]
        answers = generate(server, DOCUMENTS)
        self.found += sum(answer["meta_info"].get(kind, 0) for answer in answers)
        return [bits(answer) for answer in answers]


@pytest.fixture(scope="module")
def after_kills(tmp_path_factory: pytest.TempPathFactory, cold: list[Result]) -> Iterator[Kept]:
    """A server in the place of killed ones."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    flags = ("--cache-dir", str(folder), "--cache-dir-gb", "1")
    rng, kept = random.Random(KILLS), None
    for number in range(KILLS):
        server = run_server("demo", *flags).start()
        stop, wrong = threading.Event(), list[str]()
        clients = [
            threading.Thread(
                target=ask_until, args=(server, stop, random.Random(rng.random()), cold, wrong)
            )
            for _ in range(CLIENTS)
        ]
        kept = kept or Kept(server, folder)
        assert kept.find(server) == cold  # before any step has taken its time
        for client in clients:
            client.start()
        time.sleep(rng.uniform(0.3, 3.0))
        if number % 2:
            kill_one(server, rng.choice(["worker", "scheduler", "tokenizer"]))
            generate(server, DOCUMENTS[0])  # waits for the next one
            assert kept.find(server, "cached_tokens") == cold
        stop.set()
        kill_everything(server)
        for client in clients:
            client.join()
        assert not wrong, wrong
    with serving("demo", *flags) as server:
        kept = kept or Kept(server, folder)
        kept.server = server
        assert kept.find(server) == cold
        yield kept


def test_killed_servers_leave_what_was_on_disk(after_kills: Kept) -> None:
    found, kept = after_kills.found, after_kills.kept
    assert after_kills.server.info(check_invariants=True)
    assert kept > 0 and found >= 0.95 * kept, f"{found} of {kept} tokens on disk were used"


@pytest.fixture(scope="module")
def kept_server(after_kills: Kept) -> tuple[Server, Path]:
    """All pages of the last two documents are on disk."""
    server = after_kills.server
    for _ in range(2):
        generate(server, DOCUMENTS[6:])
    deadline = time.monotonic() + 30
    while stats(server)["disk_pages"] < 50 and time.monotonic() < deadline:
        time.sleep(0.05)
    return server, after_kills.folder


def test_a_second_server_refuses_the_directory(kept_server: tuple[Server, Path]) -> None:
    _, folder = kept_server
    with pytest.raises(ConfigError, match="uses the cache of this model"):
        InProcessEngine(resolve_model_path(DEMO_MODEL), cache_dir=str(folder))


def test_a_worker_that_is_killed_leaves_its_pages(
    kept_server: tuple[Server, Path], cold: list[Result]
) -> None:
    server, _ = kept_server
    kill_one(server, "worker")
    body = {"model": "demo", "prompt": DOCUMENTS[6], "cache": {"explain": True}}
    with ThreadPoolExecutor() as pool:  # at once: later, computing may be known to be faster
        asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=120)
        answer = generate(server, DOCUMENTS[7])
        said = asked.result().json()
    read = 16 * (len(DOCUMENTS[6]) // 16)
    assert said["usage"]["prompt_tokens_details"]["disk_tokens"] == read
    assert said["cache_explanation"]["disk"]["tokens"] == read
    assert f"{read} tokens were read from disk in" in said["cache_explanation"]["detail"]
    assert bits(answer) == cold[7]
    meta = answer["meta_info"]
    assert meta["disk_tokens"] == meta["cached_tokens"] == 16 * (len(DOCUMENTS[7]) // 16)


def test_the_reading_shows_the_disk(kept_server: tuple[Server, Path]) -> None:
    server, _ = kept_server
    metrics = httpx.get(f"{server.url}/metrics", timeout=30).text
    assert "radixrt_kv_pages_on_disk{" in metrics and "radixrt_disk_tokens_total{" in metrics
    seen = stats(server)
    assert seen["disk_pages"] >= 26 and seen["disk_stopped"] == 0


@pytest.mark.skipif(not radixrt_kernels.available(), reason="PyTorch's kernels are of one set")
def test_another_instruction_set_finds_nothing(kept_server: tuple[Server, Path]) -> None:
    _, folder = kept_server
    native = radixrt_kernels.native
    before = native.isa()
    native.use_isa("baseline")
    try:
        engine = InProcessEngine(resolve_model_path(DEMO_MODEL), cache_dir=str(folder))
        assert engine.disk is not None and engine.disk.stats()["disk_pages"] == 0
        engine.generate([DOCUMENTS[7]])
        assert engine.cached == [0]
    finally:
        native.use_isa(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = "size=2m,mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_fails_no_request(small_disk: Path, cold: list[Result]) -> None:
    with serving_in_process("demo", cache_dir=str(small_disk / "cache")) as server:
        for number in range(12):
            prompts = [[number, *document] for document in DOCUMENTS]
            for _ in range(2):
                generate(server, prompts)
            if stats(server)["disk_stopped"]:
                break
        assert stats(server)["disk_stopped"] == 1, "the disk was large enough"
        assert [bits(answer) for answer in generate(server, DOCUMENTS)] == cold
    with serving_in_process("demo", cache_dir=str(small_disk / "cache")) as server:
        assert [bits(answer) for answer in generate(server, DOCUMENTS)] == cold
