"""``--dp 2``: the death or the drain of one replica loses no answer, and the replica comes back.

The tests run in order on one server, which makes drafts, and the last one ends it. `make
torture-replicas` has many more deaths.
"""

import contextlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.server.conftest import Server
from tests.server.test_life import begun
from tests.server.test_takeover import (
    REQUESTS,
    TO_PIN,
    Stream,
    commands_of,
    post,
    process_of,
    request,
    until,
    wait_until_unready,
)
from tests.servers import samples

PAGE = 4
FLAGS = (
    *("--dp", "2", "--dtype", "float32", "--page-size", str(PAGE)),
    *("--reasoning-parser", "deepseek-r1", "--speculation", "auto"),
    *("--step-timeout", "60"),  # else a worker that a test suspends counts as stopped after 3 s
)
LONGEST_PAUSE_S = 60.0
"""Of the slowest test machine. The promise of docs/routing.md is measured by hand."""

NUM_STREAMS = 50 if "RADIXRT_TORTURE" in os.environ else 24
"""Two of each kind; ``make torture-replicas`` has more."""
MAX_ATTEMPTS = 5
GRAMMARS = {"guided_json", "guided_regex", "max_reasoning_tokens"}
"""Fields that need what a worker loads first."""


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server]) -> Server:
    return start_server(*FLAGS)


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        yield threads


def requests(salt: str) -> list[dict[str, Any]]:
    """The first three mostly repeat one token, so that drafts are accepted, whatever their price
    is, and others are not. Under a new salt, since an answer that is in the tree would end before
    its engine does. On so small a model drafts do not pay, and rest, but not behind a
    prediction."""
    sampled = {
        "temperature": 1.0,
        "speculation": True,
        "cache_salt": salt,
        "logit_bias": {"70": 4.0},
    }
    expected = {
        "messages": [{"role": "user", "content": "a"}],
        "prediction": {"type": "content", "content": "a b"},
    }
    return [
        request(**sampled, **expected, seed=20, allowed_token_ids=[70, 71, 72]),
        request(**sampled, seed=21, guided_regex="([a-f]{1,12} ){60}", ignore_eos=False),
        request(**sampled, **expected, seed=22, allowed_token_ids=[70, 71], presence_penalty=0.5),
        *REQUESTS,
    ]


@pytest.fixture(scope="module")
def undisturbed(server: Server, threads: ThreadPoolExecutor) -> list[dict[int, str]]:
    for attempt in range(MAX_ATTEMPTS):
        bodies = requests(f"undisturbed {attempt}")
        streams = list(threads.map(lambda body: Stream(server, body).run(), bodies))
        details = [stream.usage["completion_tokens_details"] for stream in streams[:3]]
        if all(
            d["accepted_prediction_tokens"] and d["rejected_prediction_tokens"] for d in details
        ):
            return [stream.texts for stream in streams]
    pytest.fail(f"drafts were not both accepted and rejected: {details}")


def processes(server: Server, name: str) -> dict[str, psutil.Process]:
    """By the number of their replica."""
    return {line[line.index("--replica") + 1]: p for p, line in commands_of(server, name).items()}


def suspend(server: Server) -> None:
    """Let no worker compute."""
    for worker in processes(server, "worker").values():
        worker.suspend()


def resume(server: Server) -> None:
    for worker in processes(server, "worker").values():
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()


def of_replica(server: Server, name: str) -> dict[str, float]:
    """A metric by replica."""
    metrics = samples(httpx.get(f"{server.url}/metrics", timeout=30).text)
    return {dict(labels)["replica"]: v for (n, labels), v in metrics.items() if n == name}


def expect_to_move(
    server: Server,
    threads: ThreadPoolExecutor,
    undisturbed: list[dict[int, str]],
    end: Callable[[str], None],
    log: str,
) -> str:
    """End a replica with running answers: they stay as they are. Returns its number."""
    until(lambda: serving_replicas(server) == ["0", "1"], LONGEST_PAUSE_S)
    attempt = 0
    while True:
        attempt += 1
        bodies, lines_before = requests(f"{log} {attempt}"), len(server.log)
        streams = [Stream(server, body) for body in bodies]
        running: list[Future[Stream]] = [threads.submit(stream.run) for stream in streams]
        for stream in streams[:8]:
            stream.wait_for_events()
        suspend(server)  # so that no answer ends before its replica does
        busy = of_replica(server, "radixrt_running_requests")
        replica = max(busy, key=busy.__getitem__)
        if busy[replica]:
            end(replica)
        resume(server)
        done = [future.result(LONGEST_PAUSE_S) for future in running]
        assert [stream.texts for stream in done] == undisturbed
        assert all(stream.finish and not stream.error for stream in done)
        assert httpx.get(f"{server.url}/ready").status_code == 200, "the other replica serves"
        if busy[replica]:
            news = "".join(server.log[lines_before:])
            assert re.search(rf"Replica {replica} has {log} with [1-9]\d* requests", news)
            return replica


def serving_replicas(server: Server) -> list[str]:
    return sorted(of_replica(server, "radixrt_steps_total"))


def test_replicas_leave_cpu_time_to_the_processes_in_front(server: Server) -> None:
    (api,) = commands_of(server, "api")
    for name in ("scheduler", "worker"):
        nice = [process.nice() for process in processes(server, name).values()]
        assert nice == 2 * [min(19, api.nice() + 3)], "half of the claim"


def test_answers_of_a_killed_replica_go_on_with_the_same_tokens(
    server: Server, threads: ThreadPoolExecutor, undisturbed: list[dict[int, str]]
) -> None:
    def kill(replica: str) -> None:
        processes(server, "worker")[replica].kill()

    expect_to_move(server, threads, undisturbed, kill, "died")
    until(lambda: serving_replicas(server) == ["0", "1"], LONGEST_PAUSE_S)
    assert server.info(check_invariants=True)["invariants"] == "ok"
    for name in ("worker", "scheduler"):
        assert len(commands_of(server, name)) == 2, "none is left over"


def cached_tokens(server: Server, body: dict[str, Any]) -> int:
    """Tokens of a prompt that the replicas hold, as far as the router knows."""
    asked = {"prompts": [body["prompt"]], "cache_salt": body["cache_salt"]}
    (match,) = post(server, "/v1/cache/match", asked).json()["matches"]
    return int(match["cached_tokens"])


def test_replicas_and_their_caches_outlive_the_tokenizer_process(
    server: Server, threads: ThreadPoolExecutor, undisturbed: list[dict[int, str]]
) -> None:
    """Greedy, sampled, two answers and JSON."""
    kinds, tokenizer = (3, 4, 6, 8), process_of(server, "tokenizer")
    before = [processes(server, name) for name in ("scheduler", "worker")]
    to_keep = {"prompt": TO_PIN, "cache_salt": "kept"}
    post(server, "/v1/cache/warm", to_keep)
    cached = cached_tokens(server, to_keep)
    assert cached > len(TO_PIN) // 8
    lease = post(server, "/v1/cache/pin", {"prompt": TO_PIN, "cache_salt": "pinned"}).json()
    for attempt in itertools.count():
        salt = f"tokenizer {attempt}"
        streams = [Stream(server, {**requests(salt)[kind], "cache_salt": salt}) for kind in kinds]
        running = [threads.submit(stream.run) for stream in streams]
        for stream in streams[:3]:
            stream.wait_for_events()
        suspend(server)  # so that no answer ends before the process
        if in_schedulers(server):
            break
        resume(server)  # the answers were faster
    tokenizer.kill()
    resume(server)
    done = [future.result(LONGEST_PAUSE_S) for future in running]
    assert [stream.texts for stream in done] == [undisturbed[kind] for kind in kinds]
    assert all(stream.finish and not stream.error for stream in done)
    assert process_of(server, "tokenizer") != tokenizer
    assert before == [processes(server, name) for name in ("scheduler", "worker")]
    until(lambda: cached_tokens(server, to_keep) == cached)  # the router hears of it again
    released = post(server, "/v1/cache/release", {"lease": lease["lease"]})
    assert released.json() == {"released_tokens": lease["pinned_tokens"]}
    assert server.info(check_invariants=True)["invariants"] == "ok"


def test_a_drain_moves_all_answers_at_once(
    server: Server, threads: ThreadPoolExecutor, undisturbed: list[dict[int, str]]
) -> None:
    def drain(replica: str) -> None:
        answer = post(server, "/v1/replicas/drain", {"replica": int(replica)})
        assert answer.json() == {"replica": int(replica), "state": "drained"}

    drained = expect_to_move(server, threads, undisturbed, drain, "drained")
    (other,) = serving_replicas(server)
    until(lambda: processes(server, "worker").keys() == {other})
    assert post(server, "/v1/replicas/drain", {"replica": int(other)}).status_code == 409
    assert post(server, "/v1/replicas/drain", {"replica": int(drained)}).status_code == 503
    assert post(server, "/v1/replicas/drain", {"replica": 2}).status_code == 404
    assert serving_replicas(server) == [other], "it waits until it is started"
    assert post(server, "/v1/replicas/start", {"replica": int(drained)}).status_code == 200
    until(lambda: processes(server, "worker").keys() == {"0", "1"})


def test_sigterm_under_many_streams_loses_none(
    server: Server, threads: ThreadPoolExecutor, undisturbed: list[dict[int, str]]
) -> None:
    bodies = requests("SIGTERM")
    kinds = [number % len(bodies) for number in range(NUM_STREAMS)]
    streams = [Stream(server, bodies[kind]) for kind in kinds]
    until(lambda: serving_replicas(server) == ["0", "1"], LONGEST_PAUSE_S)
    before = begun(server)
    suspend(server)  # all begin together, and none ends before the server is seen to be unready
    running = [threads.submit(stream.run) for stream in streams]
    free = [kind for kind in kinds if not GRAMMARS & bodies[kind].keys()]
    until(lambda: in_schedulers(server) >= num_answers(bodies, free), LONGEST_PAUSE_S)
    until(
        lambda: begun_after_a_moment(server) - before >= num_answers(bodies, kinds), LONGEST_PAUSE_S
    )
    # where grammars load late, those that need none have come far
    assert sum(not future.done() for future in running) >= NUM_STREAMS // 4
    server.process.terminate()
    wait_until_unready(server, "shutting down")
    resume(server)
    done = [future.result(LONGEST_PAUSE_S) for future in running]
    assert [stream.texts for stream in done] == [undisturbed[kind] for kind in kinds]
    assert all(stream.finish and not stream.error for stream in done)
    assert server.process.wait(30) == 0


def begun_after_a_moment(server: Server) -> int:
    """Answers that have begun when suspended workers could load some of the grammars that the
    others wait for."""
    workers = processes(server, "worker").values()
    for worker in workers:
        worker.resume()
    time.sleep(0.01)
    for worker in workers:
        worker.suspend()
    return begun(server)


def num_answers(bodies: list[dict[str, Any]], kinds: list[int]) -> int:
    return sum(bodies[kind].get("n", 1) for kind in kinds)


def in_schedulers(server: Server) -> int:
    """Answers that have come to a scheduler and have not ended."""
    stats = server.info()["stats"]
    return int(stats["running"] + stats["waiting"])
