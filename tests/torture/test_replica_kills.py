"""A hundred ends of replicas under 64 clients, half of them with drafts: no answer is lost, none
differs, and nothing is left.

Most are deaths (SIGKILL of a worker or a scheduler), one in twelve is a drain (SIGTERM of a
scheduler), and one in five is the death of the tokenizer process, which replicas survive.

RADIXRT_KILLS sets their number, RADIXRT_SEED their places.
"""

import asyncio
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.server.test_replicas import of_replica
from tests.servers import Server, serving
from tests.torture.checkpoint import adapter_flags
from tests.torture.leaks import (
    Holdings,
    module_of,
    processes_of,
    shared_memory_of,
    wait_for,
)
from tests.torture.test_kills import FLAGS, NUM_KILLS, SEED, Run, is_alive

CLIENTS = 64
REPLICAS = 2


@dataclass
class ReplicaRun(Run):
    """One server whose replicas end."""

    returns: list[float] = field(default_factory=list)
    """Seconds from each death until the replica serves again."""
    pauses_of_streams: list[float] = field(default_factory=list)
    """The longest of each stream that was open at a death."""

    def processes(self, *names: str) -> list[psutil.Process]:
        family = [process for process in self.server.family() if is_alive(process)]
        return [process for process in family if module_of(process) in names]

    async def end_one(self) -> None:
        """End a process of a replica, or the tokenizer process. Wait until all answers go on and
        the replicas are complete."""
        await self.until(lambda: len(self.open) == CLIENTS, "clients do not ask")
        await asyncio.sleep(self.rng.uniform(0, 1.0))
        of_replicas = self.processes("worker", "scheduler")
        self.shared_memory |= shared_memory_of(of_replicas)
        victim = self.rng.choice([*of_replicas, *self.processes("tokenizer")])
        name = module_of(victim)
        drains = name == "scheduler" and self.rng.random() < 0.2
        self.table["drain" if drains else "death", name] += 1
        open_streams = [found for found in self.open.values() if found.num_events]
        if name == "tokenizer":
            news = "goes on with"
        else:
            place = victim.cmdline()[victim.cmdline().index("--replica") + 1]
            news = f"Replica {place} has {'drained' if drains else 'died'} with"
        lines = self.log_count(news)
        began = time.monotonic()
        victim.send_signal(signal.SIGTERM if drains else signal.SIGKILL)
        await self.until(lambda: self.log_count(news) > lines, "no news")
        self.deaths += 1
        await self.everybody_goes_on()
        self.pauses.append(time.monotonic() - began)
        if name == "tokenizer":
            assert all(map(is_alive, of_replicas))
        while (
            len(await asyncio.to_thread(of_replica, self.server, "radixrt_steps_total")) < REPLICAS
        ):
            assert time.monotonic() - began < 180, "the replica does not come back"
        self.returns.append(time.monotonic() - began)
        self.pauses_of_streams += [found.longest_pause_s for found in open_streams]
        await self.check()


@pytest.mark.timeout(0)
@pytest.mark.parametrize("speculation", ["off", "auto"])
def test_killed_replicas_lose_no_answer(
    model: Path, speculation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def go(server: Server) -> ReplicaRun:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            run = ReplicaRun(server, random.Random(f"{SEED} {speculation}"), client)
            await run.undisturbed()
            run.holdings = Holdings.of(server)
            clients = [asyncio.create_task(run.ask_on(number)) for number in range(CLIENTS)]
            for _ in range(NUM_KILLS // 2):
                await run.end_one()
                with capsys.disabled():
                    print(
                        f"{run.deaths:4} {run.returns[-1]:5.1f} s, {sum(run.answered.values())} answers, {len(run.wrong)} wrong",
                        flush=True,
                    )
                assert len(run.wrong) < 20, "\n".join(run.wrong)
            run.is_over = True
            await asyncio.gather(*clients)
            return run

    flags = ("--dp", str(REPLICAS), "--dtype", "float32", "--speculation", speculation)
    with serving(model, *FLAGS, *adapter_flags(model), *flags) as server:
        run = asyncio.run(go(server))
        with capsys.disabled():
            print_table(run, speculation)
        assert not run.wrong, "\n".join(run.wrong)
        wait_for(lambda: not server.info()["stats"]["running"], 20, "a sequence runs on")
        assert server.info(check_invariants=True)["invariants"] == "ok"
        wait_for(lambda: Holdings.of(server) == run.holdings, 20, f"not {run.holdings}")
        (run_dir,) = server.temp_dir.iterdir()
        folders = run_dir.glob("[0-9]*.[0-9]*")
        assert sorted(int(one.name.split(".")[0]) for one in folders) == list(range(REPLICAS))
        assert server.stop() == 0
        assert processes_of(server) == [] and list(server.temp_dir.iterdir()) == []
        assert [path for path in run.shared_memory if Path(path).exists()] == []


def print_table(run: ReplicaRun, speculation: str) -> None:
    print(f"\nspeculation {speculation}: {dict(run.table)}")
    print(f"answers {sum(run.answered.values())}, lost or different {len(run.wrong)}")
    for name, seconds in (
        ("from a death until all answers go on", run.pauses),
        ("longest pause of a stream that was open at a death", run.pauses_of_streams),
        ("from a death until the replica serves again", run.returns),
    ):
        median, p99 = np.percentile(seconds, [50, 99])
        print(f"seconds {name}: median {median:.2f}, p99 {p99:.2f}, longest {max(seconds):.2f}")
