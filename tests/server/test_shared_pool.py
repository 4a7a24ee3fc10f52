"""A KV pool that outlives its worker: what was computed before a death is not computed again, and
has the bits of a cold server."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.checkpoints import make_checkpoint, make_served, make_tokenizer
from tests.servers import Server, serving
from tests.torture.leaks import module_of

DOCUMENTS = [[(11 * d + 3 * i) % 400 + 5 for i in range(150 + 40 * d)] for d in range(4)]
SMALL_DOCUMENTS = [[token % 90 for token in document] for document in DOCUMENTS[:2]]
SMALL = ("--dtype", "float32", "--speculation", "off", "--max-total-tokens", "2048")
WHOLE_PAGES = [16 * ((len(document) - 1) // 16) for document in DOCUMENTS]


def generate(
    server: Server, prompts: Any, num_tokens: int = 20, **fields: Any
) -> list[dict[str, Any]]:
    sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, **fields}
    response = httpx.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


class Streams:
    """Streamed answers to some prompts, which are read in a thread."""

    def __init__(self, server: Server, prompts: list[list[int]], num_tokens: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self._thread = threading.Thread(target=self._read, args=(server, prompts, num_tokens))
        self._thread.start()

    def _read(self, server: Server, prompts: list[list[int]], num_tokens: int) -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.tokens[event["index"]] = event["output_ids"]

    def whole(self) -> list[list[int]]:
        """All tokens."""
        self._thread.join()
        return self.tokens

    def through_a_death(self, server: Server, victim: str, after: int) -> int:
        """Kill a process when each answer has so many tokens; returns the tokens that the next
        engine computes again."""
        process = process_of(server, victim)  # looked for now: the streams do not wait for us
        deadline = time.monotonic() + 60
        while min(map(len, self.tokens)) < after and time.monotonic() < deadline:
            time.sleep(0.001)
        end(process)
        self.whole()
        counters = stats(server)  # of the new engine alone
        return counters["prompt_tokens"] - counters["cached_tokens"]


def wait_for_pages(server: Server, count: int) -> None:
    """Until so many pages are on disk."""
    deadline = time.monotonic() + 30
    while stats(server)["disk_pages"] < count and time.monotonic() < deadline:
        time.sleep(0.05)


def bits(answers: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities."""
    return [(one["output_ids"], [p[0] for p in one["meta_info"]["output_token_logprobs"]]) for one in answers]  # fmt: skip


def stats(server: Server) -> dict[str, Any]:
    return httpx.get(f"{server.url}/v1/cache/stats", timeout=60).json()


def kill(server: Server, module: str, sent: int = signal.SIGKILL, rank: int = 0) -> None:
    """Let the process of a rank end by a signal."""
    end(process_of(server, module, rank), sent)


def process_of(server: Server, module: str, rank: int = 0) -> psutil.Process:
    """The process of a rank; of one that has just died, the next."""
    deadline = time.monotonic() + 30
    while True:
        found = [one for one in server.family() if module_of(one) == module]
        if len(found) > rank:
            return sorted(found, key=lambda one: one.cmdline())[rank]
        assert time.monotonic() < deadline, f"no {module} is started"
        time.sleep(0.01)


def end(process: psutil.Process, sent: int = signal.SIGKILL) -> None:
    process.send_signal(sent)
    process.wait(30)  # until the supervisor knows of it


def cached_tokens(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


@pytest.fixture(scope="module")
def right(demo_server: Server) -> list[tuple[list[int], list[float]]]:
    """The bits of a server of which no process dies, and that has not seen the documents."""
    return bits(generate(demo_server, DOCUMENTS, cache_salt="shared pool"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("demo", "--shared-kv-pool", "on") as server:
        yield server


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_a_death_loses_no_page_and_of_running_answers_the_last(
    server: Server, demo_server: Server, right: list[tuple[list[int], list[float]]], victim: str
) -> None:
    assert bits(generate(server, DOCUMENTS)) == right
    prompts = [[len(victim) + number, *document] for number, document in enumerate(DOCUMENTS[:3])]
    streams = Streams(server, prompts, 640)
    again = streams.through_a_death(server, victim, after=40)
    answers = streams.whole()
    assert answers == Streams(demo_server, prompts, 640).whole()
    read = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    assert bits(generate(server, read, 2)) == bits(generate(demo_server, read, 2))
    assert 0 < again <= 16 * len(prompts), "tokens of a page of each"
    found = generate(server, DOCUMENTS)
    assert bits(found) == right and cached_tokens(found) == WHOLE_PAGES
    assert server.info(check_invariants=True)


def test_a_second_death_without_a_token_begins_with_an_empty_pool(server: Server) -> None:
    """What is kept could be the cause of both."""
    generate(server, DOCUMENTS)
    kill(server, "worker")
    process_of(server, "worker")  # until then the scheduler of before may answer
    stats(server)
    kill(server, "worker")
    assert cached_tokens(generate(server, [DOCUMENTS[0]])) == [0]


def test_a_worker_that_broke_its_memory_leaves_nothing(
    server: Server, right: list[tuple[list[int], list[float]]]
) -> None:
    """It may have written where it should not: a pool is only as good as the process that wrote
    it."""
    generate(server, DOCUMENTS)
    assert cached_tokens(generate(server, DOCUMENTS)) == WHOLE_PAGES
    kill(server, "worker", signal.SIGSEGV)
    again = generate(server, DOCUMENTS)
    assert bits(again) == right and cached_tokens(again) == [0] * len(DOCUMENTS)


def test_states_of_recurrent_layers_outlive_their_worker(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = make_tokenizer(make_checkpoint("qwen3_5", tmp_path_factory.mktemp("model")))
    prompts = [document[:40] for document in SMALL_DOCUMENTS]
    with serving(folder, *SMALL, "--shared-kv-pool", "on") as server:
        streams = Streams(server, prompts, 400)
        again = streams.through_a_death(server, "worker", after=20)
        assert 0 < again <= 32 * len(prompts), "tokens of a page, and those behind the last state"
        answers = streams.whole()
        read = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        found = bits(generate(server, read, 2))
        assert server.info(check_invariants=True)
        httpx.post(f"{server.url}/flush_cache", timeout=60)
        assert Streams(server, prompts, 400).whole() == answers
        httpx.post(f"{server.url}/flush_cache", timeout=60)
        assert bits(generate(server, read, 2)) == found


def test_the_parts_of_all_ranks_are_there_or_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In memory after a rank was killed, and not after one has broken its memory: then from disk, but
    for a page of which one rank's part is damaged."""
    folder = make_served(tmp_path_factory.mktemp("model"))
    cache = tmp_path_factory.mktemp("kept") / "cache"
    flags = (*SMALL, "--tp", "2", "--shared-kv-pool", "on", "--cache-dir", str(cache))
    with serving(folder, *flags) as server:
        right = bits(generate(server, SMALL_DOCUMENTS))
        kill(server, "worker", rank=1)
        again = generate(server, SMALL_DOCUMENTS)
        assert bits(again) == right and cached_tokens(again) == WHOLE_PAGES[:2]
        assert stats(server)["disk_tokens"] == 0
        wait_for_pages(server, sum(WHOLE_PAGES[:2]) // 16)
        with (next(cache.glob("*/r0")) / "pages.1").open("r+b") as pages:
            pages.truncate(pages.seek(0, 2) - 1)  # of the last page of one of the documents
        kill(server, "worker", signal.SIGSEGV, rank=1)
        again = generate(server, SMALL_DOCUMENTS)
        assert bits(again) == right
        whole, counters = sum(WHOLE_PAGES[:2]), stats(server)
        assert whole - 16 <= counters["disk_tokens"] == sum(cached_tokens(again)) < whole
        assert counters["disk_pages_damaged"] == 1
