"""A hundred deaths of an engine's processes under 32 clients: no answer is lost, none differs, and
nothing is left.

RADIXRT_KILLS sets the number of deaths, RADIXRT_SEED their places. A quarter of them hit a server
that drafts tokens, as servers on a CPU do by default; its answers end sooner, so that fewer of them
are open at a death. A fifth hit one whose model has recurrent layers.
"""

import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.servers import Server, serving
from tests.torture.checkpoint import PARSER_FLAGS, adapter_flags
from tests.torture.leaks import (
    Holdings,
    files_left,
    module_of,
    processes_of,
    shared_memory_of,
    wait_for,
)
from tests.torture.traffic import Answer, Ask, answer, kinds

NUM_KILLS = int(os.environ.get("RADIXRT_KILLS", "100"))
KILLS = {
    ("model", "off"): NUM_KILLS - NUM_KILLS // 4 - NUM_KILLS // 5,
    ("model", "auto"): NUM_KILLS // 4,
    ("hybrid", "auto"): NUM_KILLS // 5,
}
"""By the checkpoint and ``--speculation``."""
SEED = int(os.environ.get("RADIXRT_SEED", "0"))
CLIENTS = 32
SEEDS = 3
STEP_TIMEOUT_S = 4
PATIENCE_S = 180
ADAPTED = ("adapter", "other adapter", "activated adapter")
"""Kinds of requests for adapters."""
VICTIMS = ("worker", "scheduler", "tokenizer")
FLAGS = (
    *PARSER_FLAGS,
    *("--step-timeout", str(STEP_TIMEOUT_S), "--max-total-tokens", "65536"),
    *("--log-level", "warning"),
)


@dataclass(frozen=True)
class Fault:
    """One place at which an engine dies."""

    moment: str
    victims: tuple[str, ...]
    signum: int = signal.SIGKILL

    @property
    def deaths(self) -> int:
        """Of engines."""
        return 2 if "restart" in self.moment else 1


def faults(rng: random.Random, number: int) -> Iterator[Fault]:
    """Faults with ``number`` deaths."""
    moments = {
        "any": 50,
        "hang": 12,
        "two at once": 8,
        "restart": 8,
        "admission": 12,
        "grammar": 10,
        "hang in restart": 1,
    }
    while number > 0:
        moment = rng.choices(list(moments), list(moments.values()))[0]
        fault = Fault(
            moment,
            tuple(rng.sample(VICTIMS, 2 if moment == "two at once" or "restart" in moment else 1)),
            signal.SIGSTOP if "hang" in moment else signal.SIGKILL,
        )
        number -= fault.deaths
        yield fault


@dataclass
class Run:
    """One server under fire."""

    server: Server
    rng: random.Random
    client: httpx.AsyncClient
    expected: dict[int, Answer] = field(default_factory=dict)
    open: dict[int, Answer] = field(default_factory=dict)
    asks: list[Ask] = field(default_factory=lambda: list(kinds(SEEDS)))
    answered: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    deaths: int = 0
    table: Counter[tuple[str, str]] = field(default_factory=Counter)
    pauses: list[float] = field(default_factory=list)
    is_over: bool = False
    shared_memory: set[str] = field(default_factory=set)
    """Files of all processes."""
    holdings: Holdings | None = None
    """Before the first death."""

    async def undisturbed(self) -> None:
        limit = asyncio.Semaphore(16)

        async def one(index: int, ask: Ask) -> None:
            async with limit:
                self.expected[index] = await answer(self.client, ask)

        await asyncio.gather(*(one(index, ask) for index, ask in enumerate(self.asks)))
        for index, found in self.expected.items():
            assert not found.error, (self.asks[index], found.error)
        for index, ask in enumerate(self.asks):
            if ask.kind in ADAPTED:
                alone = await answer(self.client, ask)
                assert not (difference := alone.difference(self.expected[index])), difference
        self.expect_what_the_kinds_promise()

    def expect_what_the_kinds_promise(self) -> None:
        """Otherwise an equal answer after a death would mean little."""
        by_kind: dict[str, list[Answer]] = {}
        for index, ask in enumerate(self.asks):
            by_kind.setdefault(ask.kind, []).append(self.expected[index])
        for kind in ("reasoning", "reasoning, then JSON"):
            assert any(len(a.reasoning[0]) > 50 and a.texts[0] for a in by_kind[kind]), kind
        assert any("stop" in found.finish.values() for found in by_kind["stop strings"])
        for kind in ("tools", "tools do not stream"):
            assert any(found.calls for found in by_kind[kind]), kind
        assert all(len(found.finish) == 2 for found in by_kind["n=2"])
        texts = [[found.texts for found in by_kind[kind]] for kind in ("greedy", *ADAPTED)]
        assert all(a != b for one in zip(*texts, strict=True) for a, b in combinations(one, 2))

    # ------------------------------------------------------------ clients

    async def ask_on(self, number: int) -> None:
        """One client: ask until the run is over."""
        for turn in itertools.count():
            if self.is_over:
                return
            await self.ask_once((number * 7 + turn) % len(self.asks), number)

    async def ask_once(self, index: int, place: int) -> None:
        try:
            found = await answer(
                self.client, self.asks[index], lambda found: self.open.__setitem__(place, found)
            )
        except httpx.HTTPError as error:
            found = Answer(error=repr(error))
        self.open.pop(place, None)
        self.answered[self.asks[index].kind] += 1
        if difference := found.difference(self.expected[index]):
            self.wrong.append(f"after {self.deaths} deaths: {self.asks[index].kind}: {difference}")

    # ------------------------------------------------------------ faults

    def pids(self) -> dict[str, psutil.Process]:
        """The engine's processes; those that start or end just now may be missing."""
        found = {}
        for process in self.server.family():
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[module_of(process)] = process
            except psutil.NoSuchProcess:
                continue
        return {name: found[name] for name in VICTIMS if name in found}

    def log_count(self, text: str) -> int:
        return sum(text in line for line in list(self.server.log))

    async def hit(self, fault: Fault) -> None:
        """Cause a fault, and wait until every open answer goes on."""
        old = self.server.family()
        (api,) = [process for process in old if module_of(process) == "api"]
        outlive = []
        if fault.victims[0] == "tokenizer":
            outlive = [p for p in old if module_of(p) in ("worker", "scheduler")]
        self.shared_memory |= shared_memory_of(old)
        restarts, takeovers = (
            self.log_count("new engine is started"),
            self.log_count("goes on with"),
        )
        extra: list[asyncio.Task[Any]] = []
        if fault.moment == "admission":
            extra = [asyncio.create_task(self.ask_once(i, 100 + i)) for i in range(0, 48, 5)]
            await asyncio.sleep(self.rng.uniform(0, 0.05))
        elif fault.moment == "grammar":
            extra = [asyncio.create_task(self.new_grammar())]
            await asyncio.sleep(self.rng.uniform(0, 0.4))
        else:
            await asyncio.sleep(self.rng.uniform(0, 1.0))
        victims = self.pids()
        began = time.monotonic()
        for name in fault.victims[: 1 if fault.deaths == 2 else 2]:
            victims[name].send_signal(fault.signum if fault.deaths == 1 else signal.SIGKILL)
        await self.until(
            lambda: self.log_count("new engine is started") > restarts, "the death is not noticed"
        )
        if fault.moment in ("restart", "hang in restart"):
            await asyncio.sleep(self.rng.uniform(0, 3.0))
            replaced = [p for p in old if p not in outlive]
            await self.until(
                lambda: self.pids().get(fault.victims[1]) not in [None, *replaced],
                "no new process",
            )
            second = self.pids()[fault.victims[1]]
            old.append(second)
            was_ready = self.log_count("goes on with") > takeovers
            second.send_signal(fault.signum)
            await self.until(
                lambda: self.log_count("new engine is started") > restarts + 1,
                "the second death is not noticed",
            )
            takeovers += was_ready
        await self.until(lambda: self.log_count("goes on with") > takeovers, "no takeover")
        self.deaths += fault.deaths
        self.table[fault.moment, "+".join(fault.victims)] += fault.deaths
        await self.everybody_goes_on()
        self.pauses.append(time.monotonic() - began)
        for task in extra:
            await task
        stay = [api, *(outlive if fault.victims == ("tokenizer",) else [])]
        assert all(map(is_alive, stay))
        await self.until(
            lambda: not [p for p in old if is_alive(p) and p not in stay],
            "a process of a dead engine is left",
        )

    async def begun(self, number: int) -> None:
        """Wait until the server runs, or has answered, this number of requests: a drain refuses
        those that come later."""
        while True:
            answered = sum(self.answered.values())  # first, so that no request counts twice
            load = (await self.client.get("/load")).json()["server_load"]
            if answered + load >= number:
                assert load, "all answers have ended"
                return
            await asyncio.sleep(0.01)

    async def new_grammar(self) -> None:
        """Ask with a grammar that no engine has."""
        number = self.rng.randrange(10**6, 10**7)
        schema = {"type": "object", "properties": {f"key{number}": {"type": "integer"}, "x": {"enum": [number, "b"]}}, "required": [f"key{number}", "x"]}  # fmt: skip
        ask = Ask("new grammar", "/v1/completions", {"prompt": "A", "guided_json": schema, "temperature": 0, "max_tokens": 60, "stream": True})  # fmt: skip
        found = await answer(self.client, ask)
        again = await answer(self.client, ask)
        self.answered["new grammar"] += 1
        if difference := found.difference(again):
            self.wrong.append(f"after {self.deaths} deaths: new grammar: {difference}")

    async def everybody_goes_on(self) -> None:
        """Wait until each streaming answer that is open has had an event, or has ended."""
        before = {id(found): (found, found.num_events) for found in self.open.values()}
        streams = {
            key: (found, count)
            for key, (found, count) in before.items()
            if count  # has begun
        }
        done = sum(self.answered.values())

        def all_have() -> bool:
            still = {id(found) for found in self.open.values()}
            waiting = [
                k
                for k, (found, count) in streams.items()
                if k in still and found.num_events == count
            ]
            return not waiting and (bool(streams) or sum(self.answered.values()) > done)

        await self.until(all_have, "an answer does not go on")

    async def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.server.process.poll() is None, "the server has ended:\n" + "".join(
                self.server.log[-60:]
            )
            assert time.monotonic() < deadline, f"{what}\n" + "".join(self.server.log[-30:])
            await asyncio.sleep(0.01)

    async def check(self) -> None:
        response = await self.client.get("/get_server_info", params={"check_invariants": "true"})
        if response.status_code != 200:
            self.wrong.append(f"after {self.deaths} deaths: invariants: {response.text}")


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.timeout(0)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_death_during_a_drain_loses_nothing(model: Path, victim: str) -> None:
    async def go(server: Server) -> Run:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            run = Run(server, random.Random(f"{SEED} {victim}"), client)
            await run.undisturbed()
            asking = [asyncio.create_task(run.ask_once(index, index)) for index in range(CLIENTS)]
            while not any(found.num_events for found in run.open.values()):
                assert sum(run.answered.values()) < CLIENTS, "all answers have ended"
                await asyncio.sleep(0.001)
            processes = run.pids()
            processes["worker"].suspend()  # no answer ends before the last request has come
            await run.begun(CLIENTS)
            server.process.terminate()
            processes["worker"].resume()
            await asyncio.sleep(run.rng.uniform(0, 0.3))
            run.pids()[victim].kill()
            await asyncio.gather(*asking)
            return run

    flags = (*FLAGS, *adapter_flags(model), "--shutdown-grace", "120")
    with serving(model, *flags) as server:
        run = asyncio.run(go(server))
        assert not run.wrong, "\n".join(run.wrong)
        assert sum(run.answered.values()) == CLIENTS
        assert server.process.wait(30) == 0
        assert processes_of(server) == [] and list(server.temp_dir.iterdir()) == []


@pytest.fixture
def server(request: pytest.FixtureRequest, checkpoint: str, speculation: str) -> Iterator[Server]:
    folder = request.getfixturevalue(checkpoint)
    flags = (*FLAGS, *adapter_flags(folder), "--speculation", speculation)
    with serving(folder, *flags) as server:
        yield server


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("checkpoint", "speculation"), [case for case, kills in KILLS.items() if kills]
)
def test_no_answer_is_lost_and_none_differs(
    server: Server, checkpoint: str, speculation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def go() -> Run:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            run = Run(server, random.Random(f"{SEED} {checkpoint} {speculation}"), client)
            begin = time.monotonic()
            await run.undisturbed()
            with capsys.disabled():
                print(f"\nundisturbed: {time.monotonic() - begin:.1f} s")
            run.holdings = Holdings.of(server)
            info = (await client.get("/get_server_info")).json()
            drafted = info["stats"]["accepted_draft_tokens"]
            assert any(drafted.values()) == (speculation == "auto")
            clients = [asyncio.create_task(run.ask_on(number)) for number in range(CLIENTS)]
            while len([a for a in run.open.values() if a.num_events]) < 16:
                await asyncio.sleep(0.01)
            for fault in faults(run.rng, KILLS[checkpoint, speculation]):
                at = time.monotonic()
                await run.hit(fault)
                await run.check()
                with capsys.disabled():
                    print(
                        f"{run.deaths:4} {fault.moment:12} {'+'.join(fault.victims):20} {time.monotonic() - at:5.1f} s, {sum(run.answered.values())} answers, {len(run.wrong)} wrong",
                        flush=True,
                    )
                assert len(run.wrong) < 20, "\n".join(run.wrong)
            run.is_over = True
            await asyncio.gather(*clients)
            await run.check()
            return run

    run = asyncio.run(go())
    with capsys.disabled():
        print_table(run)
    assert not run.wrong, "\n".join(run.wrong)
    wait_for(
        lambda: server.info(check_invariants=True)["stats"]["running"] == 0,
        20,
        "a sequence runs on",
    )
    assert Holdings.of(server) == run.holdings
    assert files_left(server) == []
    assert server.stop() == 0
    assert processes_of(server) == []
    assert list(server.temp_dir.iterdir()) == []
    assert [path for path in run.shared_memory if Path(path).exists()] == []


def print_table(run: Run) -> None:
    print(f"\n{'moment':14} {'victims':24} deaths")
    for (moment, victims), count in sorted(run.table.items()):
        print(f"{moment:14} {victims:24} {count:6}")
    pauses = sorted(run.pauses)
    print(
        f"deaths {run.deaths}, answers {sum(run.answered.values())}, lost or different {len(run.wrong)}"
    )
    print(
        f"seconds from death to all answers going on: median {pauses[len(pauses) // 2]:.1f}, longest {pauses[-1]:.1f}"
    )
    for kind, count in sorted(run.answered.items()):
        print(f"  {kind:36} {count}")
