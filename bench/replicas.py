"""Measures the price of ``--dp 2`` on the built-in model, and the drain of such a server: ``python -m bench.replicas``, 3 minutes.

1. Throughput of many short requests: one server with two replicas against two separate servers with as many threads, nothing in
   front of them. Both are measured by turns, by the same number of clients in all.
2. Added latency: the same short requests, one at a time, to a server with one engine and one with two replicas by turns.
3. SIGTERM under 50 streams: the time until /ready says no, the answers that are whole, the exit status.

The promises: a ratio of at least 0.95, at most 0.3 ms, and at most 1 s.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from bench.local_server import PROCESSES, CpuClock, local_server, serving
from bench.markdown import markdown, mean_and_interval, median_and_range

MODEL = "demo"
_STEPS = re.compile(r"^radixrt_steps_total(?:{.*})? (\S+)$", re.MULTILINE)
FLAGS = ("--kernel-threads", "1", "--max-total-tokens", "32768", "--log-level", "warning")
"""Of each engine, so that all of them compute alike."""

CLIENTS = 32
WARM_UP_S = 2.0
OUTPUT_TOKENS = 8
STREAMS, STREAM_TOKENS = 50, 1500
LOOK_S = 0.005
"""Between two looks at /ready."""


class Connection:
    """Posts to one server over one connection, with little work of its own."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)

    async def complete(self, prompt: str, max_tokens: int) -> None:
        """Raises:
        RuntimeError: the answer is an error.
        """
        fields = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.split(b"content-length:")[1].split(b"\r\n")[0])
        content = await self._reader.readexactly(length)
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise RuntimeError(content.decode())

    def close(self) -> None:
        self._writer.close()


def prompts() -> Iterator[str]:
    """Short texts, of which no two begin alike."""
    for number in itertools.count():
        yield f"{number} is the number of this question. The cat sat on the mat, and the dog asked why."


# ------------------------------------------------------------ CPU time


@dataclass
class Turn:
    """What was measured of one side in one turn."""

    requests: int = 0
    wall_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    """By kind of process."""
    steps: float = 0.0
    """Of all workers. More small steps for the same tokens cost more CPU time."""


class Side:
    """Servers that are measured as one, and their turns."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self.turns: list[Turn] = []
        self._clock = CpuClock(urls)

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        turn = Turn()
        steps = self._steps()
        before, began = self._clock.seconds(), time.perf_counter()
        yield turn
        turn.wall_s = time.perf_counter() - began
        turn.cpu_s = {name: s - before[name] for name, s in self._clock.seconds().items()}
        turn.cpu_s["all"] = sum(turn.cpu_s.values())
        turn.steps = self._steps() - steps
        self.turns.append(turn)

    def _steps(self) -> float:
        texts = [httpx.get(f"{url}/metrics", timeout=60).text for url in self.urls]
        return sum(float(number) for text in texts for number in _STEPS.findall(text))


def cpu_table(sides: dict[str, Side]) -> list[str]:
    """CPU time for a request, by kind of process; what the second side uses more than the first, by pairs of turns."""
    rows = []
    for process in (*PROCESSES, "all"):
        base, other = (
            [1e3 * turn.cpu_s[process] / turn.requests for turn in side.turns]
            for side in sides.values()
        )
        row = {"CPU of": process}
        for name, values in zip(sides, (base, other), strict=True):
            row[f"{name}, ms"] = f"{statistics.mean(values):.3f}"
        row["added, ms"] = mean_and_interval([b - a for a, b in zip(base, other, strict=True)])
        row["ratio"] = mean_and_interval([b / a for a, b in zip(base, other, strict=True)])
        rows.append(row)
    steps = [statistics.mean(t.steps / t.requests for t in side.turns) for side in sides.values()]
    return [*markdown(rows), "", "steps for a request: " + ", ".join(f"{n:.3f}" for n in steps)]


# ------------------------------------------------------------ throughput


async def answered(urls: Sequence[str], texts: Iterator[str], seconds: float) -> int:
    """Requests of a closed loop of all clients, spread over the servers."""
    connections = [Connection(urls[number % len(urls)]) for number in range(CLIENTS)]
    done = 0
    end = time.perf_counter() + seconds

    async def ask_on(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await connection.complete(next(texts), OUTPUT_TOKENS)
            done += 1

    for connection in connections:
        await connection.open()
    await asyncio.gather(*map(ask_on, connections))
    for connection in connections:
        connection.close()
    return done


async def throughput(together: str, separate: Sequence[str], rounds: int, seconds: float) -> str:
    texts = prompts()
    sides = {"two servers": Side([*separate]), "--dp 2": Side([together])}
    for side in sides.values():
        await answered(side.urls, texts, WARM_UP_S)
    for turn in range(rounds):
        for side in list(sides.values())[:: 1 if turn % 2 == 0 else -1]:
            with side.turn() as measured:
                measured.requests = await answered(side.urls, texts, seconds)
    rates = {name: [turn.requests / turn.wall_s for turn in side.turns] for name, side in sides.items()}  # fmt: skip
    ratios = [two / one for one, two in zip(*rates.values(), strict=True)]
    row = {f"{name}, requests/s": median_and_range(values) for name, values in rates.items()}
    return "\n".join([*markdown([{**row, "ratio": mean_and_interval(ratios)}]), "", *cpu_table(sides)])  # fmt: skip


# ------------------------------------------------------------ latency


async def added_latency(one: str, two: str, rounds: int, pairs: int) -> str:
    """Milliseconds of requests of one token, one at a time, to both servers by turns."""
    sides = {"--dp 1": Side([one]), "--dp 2": Side([two])}
    connections = {name: Connection(*side.urls) for name, side in sides.items()}
    texts = prompts()
    for connection in connections.values():
        await connection.open()
    added: list[float] = []
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-1, rounds):  # the first warms up
        with ExitStack() as stack:
            if number >= 0:
                for side in sides.values():
                    stack.enter_context(side.turn()).requests = pairs
            times = await _paired_ms(list(connections.values()), texts, pairs)
        if number >= 0:
            added.append(statistics.median(b - a for a, b in zip(*times, strict=True)))
            for values, measured in zip(medians.values(), times, strict=True):
                values.append(statistics.median(measured))
    for connection in connections.values():
        connection.close()
    row = {f"{name}, ms": f"{statistics.median(values):.2f}" for name, values in medians.items()}
    row["added by pair, ms"] = mean_and_interval(added, 2)
    return "\n".join([*markdown([row]), "", *cpu_table(sides)])


async def _paired_ms(
    connections: Sequence[Connection], texts: Iterator[str], pairs: int
) -> tuple[list[float], list[float]]:
    """Times of the same requests on two connections."""
    times: tuple[list[float], list[float]] = ([], [])
    for number, text in enumerate(itertools.islice(texts, pairs)):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            began = time.perf_counter()
            await connections[side].complete(text, 1)
            times[side].append(1e3 * (time.perf_counter() - began))
    return times


# ------------------------------------------------------------ drain


async def whole_answer(client: httpx.AsyncClient, number: int, begun: list[int]) -> bool:
    """Stream an answer; whether it came whole."""
    body = {
        "prompt": f"{number} streams", "max_tokens": STREAM_TOKENS, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    last = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                if not last:
                    begun.append(number)
                last = line
    usage = json.loads(last.removeprefix("data: ") or "{}").get("usage") or {}
    return bool(usage.get("completion_tokens") == STREAM_TOKENS)


def seconds_until_unready(url: str, began: float) -> float:
    host = urlsplit(url).netloc
    while True:
        connection = http.client.HTTPConnection(host, timeout=10)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status != 200:
                return time.perf_counter() - began
        except OSError:
            return time.perf_counter() - began
        finally:
            connection.close()
        time.sleep(LOOK_S)


async def drain(url: str, process: "subprocess.Popen[bytes]") -> dict[str, object]:
    """End a server under its streams."""
    found: list[float] = []
    begun: list[int] = []
    limits = httpx.Limits(max_connections=STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        streams = [
            asyncio.create_task(whole_answer(client, number, begun)) for number in range(STREAMS)
        ]
        while len(begun) < STREAMS:
            await asyncio.sleep(0.01)
        running = sum(not stream.done() for stream in streams)
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        looking = threading.Thread(
            target=lambda: found.append(seconds_until_unready(url, began)), daemon=True
        )
        looking.start()
        whole = sum(await asyncio.gather(*streams))
    status = await asyncio.to_thread(process.wait, 60)
    looking.join()
    return {
        "streams at SIGTERM": running,
        "unready after, s": f"{found[0]:.3f}",
        "whole answers": whole,
        "ended after, s": f"{time.perf_counter() - began:.1f}",
        "exit status": status,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["throughput", "latency", "drain"])
    parser.add_argument("--rounds", type=int, default=10, help="of throughput and of latency")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of a round of throughput and a side"
    )
    parser.add_argument("--pairs", type=int, default=150, help="of requests in a round of latency")
    parser.add_argument("--drains", type=int, default=3)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        if arguments.only in (None, "throughput", "latency"):
            replicas = stack.enter_context(local_server(MODEL, *FLAGS, "--dp", "2"))
            first = stack.enter_context(local_server(MODEL, *FLAGS))
        if arguments.only in (None, "latency"):
            measuring = added_latency(first, replicas, arguments.rounds, arguments.pairs)
            print(asyncio.run(measuring), flush=True)
        if arguments.only in (None, "throughput"):
            second = stack.enter_context(local_server(MODEL, *FLAGS))
            measuring = throughput(replicas, [first, second], arguments.rounds, arguments.seconds)
            print(asyncio.run(measuring), flush=True)
    if arguments.only in (None, "drain"):
        rows = []
        for _ in range(arguments.drains):
            with serving(MODEL, *FLAGS, "--dp", "2") as (url, process):
                rows.append(asyncio.run(drain(url, process)))
        print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
