"""200 requests that alternate between three models, of which the memory holds two, while processes
of all engines are killed: none fails, none differs, and the memory is kept. Where this process may
make a control group, the server has no more memory than that.

RADIXRT_REQUESTS sets their number, RADIXRT_SEED the places of the deaths.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil

from tests.servers import Server
from tests.servers.several_models import (
    MEMORY_MB,
    NAMES,
    body_for,
    engine_processes,
    label_of,
    memory_mb,
    streamed,
    three_models,
)
from tests.torture.control_group import ControlGroup

NUM_REQUESTS = int(os.environ.get("RADIXRT_REQUESTS", "200"))
SEED = int(os.environ.get("RADIXRT_SEED", "0"))
CLIENTS = 8
PROMPTS = 6
LOOK_S = 0.5
BETWEEN_DEATHS_S = (0.0, 4.0)
BETWEEN_DEATHS = 4
"""Answers."""
LENGTH = 300
REAL_MB = 950
"""Memory of the control group: engines, supervisor and api. Two of the tiny engines fit, three do
not; what the server reckons with has room for larger ones."""


def test_three_models_in_the_memory_of_two_lose_no_answer(
    checkpoint: Callable[[str], Path],
) -> None:
    with contextlib.ExitStack() as stack:
        try:
            group = ControlGroup(REAL_MB)
        except OSError as error:
            group = None
            print(f"\nNo control group ({error}): the limit is what the server keeps by itself.")
        else:
            stack.callback(group.remove)
        with group.entered() if group else contextlib.nullcontext():
            server = stack.enter_context(three_models(checkpoint, "--log-level", "info"))
        run = Run(server)
        asyncio.run(run.all())
        run.report()
        assert not run.wrong and run.answered.total() == NUM_REQUESTS
        assert run.most_mb <= MEMORY_MB
        if group is not None:
            print(f"At most {group.peak_mb:.0f} of {REAL_MB} MiB, with cached files.")
            assert group.deaths == 0
        assert min(run.loads.values()) > 1, "nothing was unloaded"
        server.process.terminate()
        assert server.process.wait(60) == 0


class Run:
    """One server under fire."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rng = random.Random(SEED)
        self.expected: dict[tuple[str, int], str] = {}
        self.answered: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()
        self.loads: dict[str, float] = {}
        self.wrong: list[str] = []
        self.most_mb = 0.0
        self.took_s = 0.0

    async def all(self) -> None:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=600) as client:
            for model in NAMES:
                for number in range(PROMPTS):
                    body = body_for(model, number, length=LENGTH)
                    self.expected[model, number] = await streamed(client, body)
            assert len({self.expected[model, 0] for model in NAMES}) == len(NAMES)
            begun, left = time.monotonic(), iter(range(NUM_REQUESTS))
            background = [asyncio.create_task(one) for one in (self.kill(client), self.weigh())]
            await asyncio.gather(*(self.ask(client, left) for _ in range(CLIENTS)))
            self.took_s = time.monotonic() - begun
            for task in background:
                task.cancel()
            metrics = (await client.get("/metrics")).text
        for line in metrics.splitlines():
            if line.startswith("radixrt_model_loads{"):
                name, value = line.split('"')[1], line.split()[-1]
                self.loads[name] = float(value)

    async def ask(self, client: httpx.AsyncClient, left: Iterator[int]) -> None:
        for number in left:
            model, prompt = NAMES[number % len(NAMES)], number % PROMPTS
            try:
                text = await streamed(client, body_for(model, prompt, length=LENGTH))
            except (AssertionError, httpx.HTTPError) as error:
                self.wrong.append(f"{number} {model}: {type(error).__name__}: {error}")
                continue
            self.answered[model] += 1
            if text != self.expected[model, prompt]:
                self.wrong.append(f"{number} {model}: another answer")

    async def kill(self, client: httpx.AsyncClient) -> None:
        """Kill a process of a model that serves: another death while it starts again could be the
        third without a token."""
        while True:
            await asyncio.sleep(self.rng.uniform(*BETWEEN_DEATHS_S))
            models = (await client.get("/v1/models")).json()["data"]
            serving = {model["id"] for model in models if model["state"] == "loaded"}
            victims = {label_of(process): process for process in engine_processes(self.server)}
            labels = sorted(label for label in victims if label.partition("/")[0] in serving)
            if not labels:
                continue
            label = self.rng.choice(labels)
            with contextlib.suppress(psutil.NoSuchProcess):  # it was just unloaded
                victims[label].send_signal(signal.SIGKILL)
                self.deaths[label] += 1
            answered = self.answered.total()
            while self.answered.total() < answered + BETWEEN_DEATHS:
                await asyncio.sleep(LOOK_S)

    async def weigh(self) -> None:
        while True:
            self.most_mb = max(self.most_mb, await asyncio.to_thread(memory_mb, self.server))
            await asyncio.sleep(LOOK_S)

    def report(self) -> None:
        print(
            f"\n{dict(self.answered)} answers in {self.took_s:.0f} s, deaths {dict(self.deaths)}, loads {self.loads}, at most "
            f"{self.most_mb:.0f} of {MEMORY_MB} MiB, wrong: {self.wrong}"
        )
