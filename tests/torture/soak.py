"""A server under a mixed load for an hour: invariants, memory, files and threads of each process.

    SOAK_MINUTES=60 python -m tests.torture.soak

The load is an open loop of SOAK_RATE requests a second (default 3): short and long prompts, JSON
and new grammars, kept conversations, sessions and leases, answers that do not stream, and clients
that leave, and adapters that come and go. The KV pool is small, so that eviction and retraction never rest. Prints a table; the
exit status is 1 if an invariant is broken, an answer fails, or a process grows.
"""

import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.servers import Server, serving
from tests.torture.checkpoint import (
    END_OF_THINKING,
    PARSER_FLAGS,
    adapter_flags,
    make_reasoning_checkpoint,
)
from tests.torture.leaks import module_of, processes_of
from tests.torture.traffic import SCHEMA, TOOL, asks

MINUTES = float(os.environ.get("SOAK_MINUTES", "60"))
RATE = float(os.environ.get("SOAK_RATE", "3"))
SEED = int(os.environ.get("RADIXRT_SEED", "0"))

SAMPLE_S = 5.0
CHECK_S = 30.0
WARM_UP = 1 / 3
"""Part of the time in which the rest of the caches fills."""
FILL = {
    "new_grammar": 4600, "turn": 3600, "any_kind": 2000, "long_prompt": 600, "session": 600, "leaves": 1600, "lease": 200, "calls": 100,
    "is_aborted": 200, "adapter": 100,
}  # fmt: skip
"""Requests ahead of the measured time, in random order, which fill the bounded caches: 2,048
compiled grammars, 256 loaded ones, 1 MB of kept conversations, 0.5 MB of kept answers and of texts
of nodes, the 4,000 words whose tokens the tokenizers library keeps in each thread, and 512 requests
with several answers. About twice as many as that takes: each replacement fragments the heap, until
it has the places for all sizes (the tokenizer process grew by 1.4 MB over the first 13,000
requests, and by 0.1 over the next 3,600)."""
FILLED_FROM_MINUTES = 10
"""A shorter run sends fewer of them."""

MAX_GROWTH_AN_HOUR = 0.01
MIN_MINUTES = 30
"""A shorter run does not judge the growth."""
MIN_GROWTH_MB = 1.0
"""Growth over the measured time that could be the allocator's granularity."""
MAX_MORE_FDS = 8
MAX_MORE_THREADS = 4

HELPERS = "helpers of the tokenizer"

FLAGS = (
    *PARSER_FLAGS,
    *("--max-total-tokens", "8192", "--max-running-requests", "32", "--log-level", "warning"),
    *("--kept-conversations-mb", "1"),
)


@dataclass
class Sample:
    """One process at one time."""

    at_s: float
    rss_mb: float
    fds: int
    threads: int


@dataclass
class Soak:
    """One run."""

    server: Server
    client: httpx.AsyncClient
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    answered: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    """Ids of kept conversations."""
    begin: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        await self.fill()
        self.begin = time.monotonic()
        sampling = asyncio.create_task(self.watch())
        open_requests: set[asyncio.Task[None]] = set()
        for number in itertools.count():
            if time.monotonic() - self.begin > 60 * MINUTES:
                break
            task = asyncio.create_task(self.one(number))
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)
            await asyncio.sleep(self.rng.expovariate(RATE))
        if open_requests:
            await asyncio.wait(open_requests, timeout=120)
        sampling.cancel()
        await self.check(idle=True)

    async def fill(self) -> None:
        limit = asyncio.Semaphore(8)

        async def one(kind: str, number: int) -> None:
            async with limit:
                await getattr(self, kind)(number)

        share = min(1.0, MINUTES / FILLED_FROM_MINUTES)
        requests = [(kind, i) for kind, count in FILL.items() for i in range(int(share * count))]
        self.rng.shuffle(requests)
        await asyncio.gather(*(one(kind, number) for kind, number in requests))
        print(f"filled in {time.monotonic() - self.begin:.0f} s", flush=True)

    # ------------------------------------------------------------ load

    async def one(self, number: int) -> None:
        kinds = [
            self.any_kind, self.any_kind, self.any_kind, self.long_prompt, self.new_grammar, self.turn, self.turn,
            self.session, self.lease, self.calls, self.leaves, self.leaves, self.is_aborted,
            self.adapter,
        ]  # fmt: skip
        kind = self.rng.choice(kinds)
        try:
            await kind(10_000 + number)
        except Exception as error:
            self.failures.append(f"{kind.__name__}: {error!r}"[:300])
        self.answered[kind.__name__] += 1

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, f"{response.status_code} {response.text}"
        return dict(response.json())

    async def any_kind(self, number: int) -> None:
        ask = self.rng.choice(asks(number % 50))
        body = {**ask.body, "max_tokens": self.rng.randrange(20, 200)}
        body.pop("min_tokens", None)
        async with self.client.stream("POST", ask.path, json=body) as response:
            text = (await response.aread()).decode()
        assert response.status_code == 200 and '"error"' not in text, text

    async def long_prompt(self, number: int) -> None:
        ids = [self.rng.randrange(3, 380) for _ in range(self.rng.randrange(600, 1900))]
        body = {"prompt": ids, "max_tokens": 20, "temperature": 0.5, "ignore_eos": True}
        await self.post("/v1/completions", body)

    async def new_grammar(self, number: int) -> None:
        schema = {**SCHEMA, "required": ["a"], "title": str(number)}
        schema["properties"] = {"a": {"type": "string", "maxLength": 5 + number % 300}, f"k{number}": {"enum": ["x", number]}}  # fmt: skip
        body = {"prompt": "J", "guided_json": schema, "max_tokens": 60, "seed": number + 1}
        await self.post("/v1/completions", body)

    async def turn(self, number: int) -> None:
        """Of a kept conversation."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"What about {number}?"}],
            "max_tokens": 40,
            "keep": True,
            "logit_bias": {str(END_OF_THINKING): 5.0},
        }
        before = self.rng.choice(self.kept) if self.kept and self.rng.random() < 0.7 else None
        response = await self.client.post(
            "/v1/chat/completions", json=body | ({"continue_from": before} if before else {})
        )
        if before and response.status_code in (400, 404):  # forgotten, or over the context
            self.kept.remove(before) if before in self.kept else None
            return
        assert response.status_code == 200, response.text
        self.kept = [*self.kept[-40:], response.json()["id"]]

    async def session(self, number: int) -> None:
        name, prompt = f"session-{number}", f"Session {number}. " * self.rng.randrange(1, 20)
        for _ in range(self.rng.randrange(1, 4)):
            body = {"prompt": prompt, "max_tokens": 30, "cache": {"session": name}}
            prompt += (await self.post("/v1/completions", body))["choices"][0]["text"][:60] or "x"
        if self.rng.random() < 0.7:
            await self.post("/v1/cache/release", {"session": name})

    async def lease(self, number: int) -> None:
        body = {"prompt": f"Pinned {number % 20}. " * 8, "ttl_s": self.rng.choice([1, 5])}
        response = await self.client.post("/v1/cache/pin", json=body)
        assert response.status_code in (200, 429, 409), response.text
        if response.status_code == 200 and self.rng.random() < 0.5:
            await self.client.post("/v1/cache/release", json={"lease": response.json()["lease"]})

    async def adapter(self, number: int) -> None:
        """Load an adapter under a new name, use it and unload it; another may have the last
        place."""
        infos = (await self.client.get("/v1/models")).json()["data"]
        path = next(info["root"] for info in infos if info["id"] == "two")
        name = f"hot-{number}"
        loaded = await self.client.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}
        )
        assert loaded.status_code in (200, 409), loaded.text
        if loaded.status_code == 200:
            await self.post("/v1/completions", {"model": name, "prompt": "A", "max_tokens": 20})
            await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def calls(self, number: int) -> None:
        words = " ".join(str(250 * number + i) for i in range(250))
        ids = (await self.post("/tokenize", {"prompt": words}))["tokens"]
        await self.post("/detokenize", {"tokens": ids})
        for path in ("/metrics", "/v1/cache/stats", "/v1/cache/tree", "/v1/models"):
            assert (await self.client.get(path)).status_code == 200

    async def leaves(self, number: int) -> None:
        """A client that leaves in the middle."""
        body = {"prompt": f"Leave {number}", "max_tokens": 400, "ignore_eos": True, "stream": self.rng.random() < 0.7, "tools": None, "n": self.rng.choice([1, 2])}  # fmt: skip
        try:
            async with asyncio.timeout(self.rng.choice([0.01, 0.1, 0.5])):
                await self.client.post("/v1/completions", json=body)
        except TimeoutError:
            pass

    async def is_aborted(self, number: int) -> None:
        name = f"abort-{number}"
        body = {"messages": [{"role": "user", "content": "Go"}], "rid": name, "max_tokens": 500, "ignore_eos": True, "tools": [TOOL]}  # fmt: skip
        asking = asyncio.create_task(self.client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        await self.client.post("/abort_request", json={"rid": name})
        await asking

    # ------------------------------------------------------------ measurements

    async def watch(self) -> None:
        next_check = time.monotonic() + CHECK_S
        while True:
            self.sample()
            if time.monotonic() > next_check:
                next_check += CHECK_S
                await self.check()
            await asyncio.sleep(SAMPLE_S)

    def sample(self) -> None:
        at_s, helpers = time.monotonic() - self.begin, 0.0
        for process in (psutil.Process(self.server.process.pid), *self.server.family()):
            try:
                name, rss_mb = module_of(process), process.memory_info().rss / 1e6
                found = Sample(at_s, rss_mb, process.num_fds(), process.num_threads())
            except psutil.NoSuchProcess:
                continue
            if name == "constrained":  # they are replaced from time to time
                helpers += rss_mb
                continue
            self.samples.setdefault(name, []).append(found)
        self.samples.setdefault(HELPERS, []).append(Sample(at_s, helpers, 0, 0))

    async def check(self, idle: bool = False) -> None:
        response = await self.client.get("/get_server_info", params={"check_invariants": "true"})
        if response.status_code != 200:
            self.failures.append(f"invariants: {response.text}")
        elif idle:
            stats = response.json()["stats"]
            for name in ("running", "waiting", "pages_owned", "malformed_frames"):
                if stats[name]:
                    self.failures.append(f"{stats[name]} {name} at the end")


def slope_per_hour(samples: list[Sample]) -> float:
    """MB an hour: the median slope of pairs of samples (Theil and Sen). Of pairs half of the time
    apart, which are the most exact."""
    half = len(samples) // 2
    pairs = zip(samples[:-half], samples[half:], strict=False)
    return 3600 * statistics.median((b.rss_mb - a.rss_mb) / (b.at_s - a.at_s) for a, b in pairs)


def report(soak: Soak) -> list[str]:
    """Print the table; returns the violations."""
    violations = [*soak.failures]
    print(f"\n{sum(soak.answered.values())} requests in {MINUTES:g} minutes: {dict(soak.answered)}")
    print(
        f"{'process':26} {'RSS MB':>8} {'at the end':>10} {'MB/h':>8} {'%/h':>7}  fds      threads"
    )
    for name, samples in soak.samples.items():
        measured = [s for s in samples if s.at_s > WARM_UP * 60 * MINUTES]
        if len(measured) < 6:
            violations.append(f"{name}: too few samples")
            continue
        first, last, slope = measured[0], measured[-1], slope_per_hour(measured)
        level = statistics.median(s.rss_mb for s in measured)
        print(
            f"{name:26} {first.rss_mb:8.1f} {last.rss_mb:10.1f} {slope:8.2f} {100 * slope / max(level, 1):7.2f}  "
            f"{first.fds}..{max(s.fds for s in measured)}  {first.threads}..{max(s.threads for s in measured)}"
        )
        growth = slope * (last.at_s - first.at_s) / 3600
        is_too_much = slope > MAX_GROWTH_AN_HOUR * level and growth > MIN_GROWTH_MB
        if MINUTES >= MIN_MINUTES and is_too_much and name != HELPERS:
            violations.append(f"{name} grows by {slope:.1f} MB an hour")
        fds = [s.fds for s in measured]
        if statistics.median(fds[-6:]) > statistics.median(fds[:6]) + MAX_MORE_FDS:
            violations.append(f"{name}: {fds[0]} open files became {fds[-1]}")
        if last.threads > first.threads + MAX_MORE_THREADS:
            violations.append(f"{name}: {first.threads} threads became {last.threads}")
    return violations


async def _run(server: Server) -> Soak:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        soak = Soak(server, client)
        await soak.run()
        return soak


def main() -> int:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="radixrt-soak-"))
        model = make_reasoning_checkpoint(Path(folder))
        server = stack.enter_context(serving(model, *FLAGS, *adapter_flags(model)))
        violations = report(soak := asyncio.run(_run(server)))
        if path := os.environ.get("SOAK_SAMPLES"):
            rows = [f"{name},{s.at_s:.0f},{s.rss_mb:.2f},{s.fds},{s.threads}" for name, samples in soak.samples.items() for s in samples]  # fmt: skip
            Path(path).write_text("\n".join(rows))
        if server.stop() != 0 or processes_of(server):
            violations.append("the server did not end, or a process is left")
        violations += [
            line.strip() for line in server.log if "Traceback" in line or "ERROR" in line
        ]
    for violation, count in Counter(violations).most_common(40):
        print(f"{count} x {violation}")
    print("violated" if violations else "ok")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
