"""What the runs of a batch begin with stays in the cache while the batch needs it, and no longer, however it ends."""

import _thread
import threading
import time
from typing import Any

import httpx
import pytest

import radixrt.lang as rl
from radixrt import LLM
from radixrt.lang.pins import SHORTEST_CHARS
from tests.lang.scripted_backend import ScriptedBackend
from tests.servers import Server

BOOK = "The owner of Vidur is Noval. The port of Vidur is Teska. The fee of Vidur is 42. " * 60
assert len(BOOK) > SHORTEST_CHARS


def stats(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/v1/cache/stats").json()
    return found


def wait_until_pinned(server: Server) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while not (found := stats(server))["leases"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


@rl.function(temperature=0, max_tokens=8)
def ask(s: rl.State, number: int) -> None:
    s += rl.system(BOOK) + rl.user(f"{number}: what is the fee of Vidur?")
    s += rl.assistant(rl.gen("x"))


def retention_of_book(server: Server) -> str:
    """Of the node that begins with the book."""
    tree = httpx.get(f"{server.url}/v1/cache/tree?depth=6&children=50").json()
    pending = [node for space in tree["namespaces"] for node in space["children"]]
    while pending:
        node = pending.pop(0)
        if "Vidur" in (node["text"] or "") and node["total_tokens"] > 300:
            return str(node["retention"])
        pending += node["children"]
    raise AssertionError("the book is not in the cache")


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("ends", ["well", "with an error", "with Ctrl-C"])
def test_a_shared_prefix_is_pinned_for_as_long_as_the_batch(
    server: Server, backend: rl.Server, ends: str
) -> None:
    httpx.post(f"{server.url}/flush_cache")
    assert stats(server)["leases"] == 0
    seen: list[int] = []
    lock = threading.Lock()

    @rl.function
    def program(s: rl.State, number: int) -> None:
        ask(s, number)
        assert s["x"]
        with lock:
            if not seen:
                seen.append(wait_until_pinned(server)["tokens"]["pinned"])
                if ends == "with an error":
                    raise ValueError("the program's own")
                if ends == "with Ctrl-C":
                    _thread.interrupt_main()
                    time.sleep(0.2)

    inputs = [{"number": number} for number in range(4)]
    if ends == "with Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            program.run_batch(inputs, max_concurrency=1, backend=backend, progress=False)
    else:
        states = program.run_batch(inputs, max_concurrency=1, backend=backend, progress=False)
        assert sum(state.error is not None for state in states) == (ends == "with an error")
    assert seen and seen[0] > len(BOOK) // 8
    after = stats(server)
    assert after["leases"] == after["tokens"]["pinned"] == 0


def test_runs_one_at_a_time_leave_what_they_share_as_it_is(
    server: Server, backend: rl.Server
) -> None:
    httpx.post(f"{server.url}/flush_cache")
    inputs = [{"number": number} for number in range(3)]
    before = stats(server)
    states = ask.run_batch(inputs, max_concurrency=1, backend=backend, progress=False)
    time.sleep(0.2)  # for releases to come in
    after = stats(server)
    computed = sum(
        sign * (one["prompt_tokens"] - one["cached_tokens"])
        for sign, one in ((1, after), (-1, before))
    )
    assert isinstance(states[0], rl.State)
    prompt_tokens = states[0].calls()[0].usage.prompt_tokens
    assert computed < prompt_tokens + 3 * 32
    assert retention_of_book(server) == "default"


def test_an_engine_in_this_process_pins_and_releases_too(demo_llm: LLM) -> None:
    pinned: list[int] = []

    @rl.function
    def program(s: rl.State, number: int) -> None:
        ask(s, number)
        assert s["x"]
        deadline = time.monotonic() + 30
        while not pinned and time.monotonic() < deadline:
            if demo_llm.cache_stats().leases:
                pinned.append(demo_llm.cache_stats().tokens.pinned)

    inputs = [{"number": number} for number in range(3)]
    program.run_batch(inputs, max_concurrency=1, backend=rl.Engine(demo_llm), progress=False)
    assert pinned[0] > len(BOOK) // 8
    assert demo_llm.cache_stats().leases == 0


def test_short_or_lonely_prefixes_are_not_pinned() -> None:
    @rl.function
    def program(s: rl.State, text: str) -> None:
        s += text + rl.gen("x")

    for texts in (["short one", "short two"], [f"{number}{BOOK}" for number in range(3)]):
        backend = ScriptedBackend(lambda prompt: "x")
        inputs = [{"text": text} for text in texts]
        program.run_batch(inputs, max_concurrency=1, backend=backend, progress=False)
        assert backend.pinned == {}


def test_a_group_is_let_go_of_when_its_last_run_has_ended() -> None:
    backend = ScriptedBackend(lambda prompt: "x")
    held_at: dict[str, int] = {}

    @rl.function
    def program(s: rl.State, text: str) -> None:
        s += text + rl.gen("x")
        assert s["x"]
        time.sleep(0.05)  # for the lease to be taken
        held_at[text[-2:]] = len(backend.pinned) - len(backend.unpinned)

    inputs = [{"text": f"{letter}{BOOK}{letter}{number}"} for letter in "ab" for number in range(3)]
    program.run_batch(inputs, max_concurrency=1, backend=backend, progress=False)
    assert len(backend.pinned) == len(backend.unpinned) == 2
    assert max(held_at.values()) == 1
    for letter, prefix in zip("ab", backend.pinned.values(), strict=True):
        assert isinstance(prefix, str) and prefix[1:] == f"{BOOK}{prefix[0]}", letter
