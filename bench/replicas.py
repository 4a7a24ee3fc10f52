"""Measures the price of ``--dp 2``, and the router: ``python -m bench.replicas``, 3 minutes.

1. Throughput of short requests: one server with two replicas against two servers with as many
   threads in all, by turns, with the same number of clients.
2. Added latency of such requests, one at a time, on servers with one engine and two, by turns.
3. CPU time of a routing decision among 16 replicas with full pools, one of which has half of the
   prompt: hash its blocks, look them up, compare the costs, note the choice; and of a next turn.

The promises: a ratio of at least 0.95, at most 0.3 ms, and p99 of at most 0.5 ms for 8k tokens and
of 6 ms for 100k.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from urllib.parse import urlsplit

import msgspec
import numpy as np

from bench.local_server import CpuClock, local_server
from bench.markdown import markdown, mean_and_interval, median_and_range
from radixrt.kv.events import BlockStored, EventBatch, block_hashes, namespace_hash
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.ids import pack_ids
from radixrt.messages.replicas import ReplicaLoad
from radixrt.router.router import RoutedPrompt, Router

MODEL = "demo"
FLAGS = ("--kernel-threads", "1", "--max-total-tokens", "32768", "--log-level", "warning")
"""Flags of each engine, so that all of them compute alike."""

CLIENTS = 32
WARM_UP_S = 2.0
OUTPUT_TOKENS = 8

REPLICAS, PAGE_SIZE, POOL_TOKENS, VOCABULARY = 16, 16, 1 << 20, 100_000
"""The replicas of the routing decisions."""
ROUTED_TOKENS = (8192, 100_000)
TURN_TOKENS = 500
"""Tokens of an answer and the next question."""


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
    sides = {"two servers": [*separate], "--dp 2": [together]}
    clocks = {name: CpuClock(urls) for name, urls in sides.items()}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu_ms: dict[str, list[float]] = {name: [] for name in sides}
    for urls in sides.values():
        await answered(urls, texts, WARM_UP_S)
    for turn in range(rounds):
        for name, urls in list(sides.items())[:: 1 if turn % 2 == 0 else -1]:
            before, began = clocks[name].seconds(), time.perf_counter()
            count = await answered(urls, texts, seconds)
            rates[name].append(count / (time.perf_counter() - began))
            cpu_ms[name].append(1e3 * (clocks[name].seconds() - before) / count)
    row = {f"{name}, requests/s": median_and_range(values) for name, values in rates.items()}
    row["ratio"] = _ratio(rates)
    row |= {f"{name}, CPU ms": f"{statistics.mean(values):.2f}" for name, values in cpu_ms.items()}
    return "\n".join(markdown([row | {"ratio of CPU": _ratio(cpu_ms)}]))


def _ratio(values: dict[str, list[float]]) -> str:
    """Ratio of the second side to the first, by pairs of turns."""
    return mean_and_interval([b / a for a, b in zip(*values.values(), strict=True)])


# ------------------------------------------------------------ latency


async def added_latency(one: str, two: str, rounds: int, pairs: int) -> str:
    """Milliseconds of requests of one token, one at a time, to both servers by turns."""
    connections = {"--dp 1": Connection(one), "--dp 2": Connection(two)}
    texts = prompts()
    for connection in connections.values():
        await connection.open()
    added: list[float] = []
    medians: dict[str, list[float]] = {name: [] for name in connections}
    for number in range(-1, rounds):  # the first warms up
        times = await _paired_ms(list(connections.values()), texts, pairs)
        if number >= 0:
            added.append(statistics.median(b - a for a, b in zip(*times, strict=True)))
            for values, measured in zip(medians.values(), times, strict=True):
                values.append(statistics.median(measured))
    for connection in connections.values():
        connection.close()
    row = {f"{name}, ms": f"{statistics.median(values):.2f}" for name, values in medians.items()}
    row["added by pair, ms"] = mean_and_interval(added, 2)
    return "\n".join(markdown([row]))


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


# ------------------------------------------------------------ routing


def decision(num_tokens: int, decisions: int) -> dict[str, str]:
    """CPU time of routing prompts of ``num_tokens``."""
    random = np.random.default_rng(1)
    router = Router(PAGE_SIZE)
    for replica in range(REPLICAS):
        router.join(replica)
        filler = random.integers(0, VOCABULARY, POOL_TOKENS)
        _store(router, replica, 1, pack_ids(filler))
    sequences = [1] * REPLICAS
    answers = dict.fromkeys(range(REPLICAS), 0)
    first: list[float] = []
    hashing: list[float] = []
    next_turn: list[float] = []
    for number in range(decisions):
        packed = pack_ids(random.integers(0, VOCABULARY, num_tokens))
        replica = int(random.integers(REPLICAS))
        sequences[replica] += 1
        _store(router, replica, sequences[replica], packed[: 2 * num_tokens])
        router.report(
            replica, ReplicaLoad(received=1 << 30, waiting_s=0.01 * number % 1, pool_tokens=1 << 20)
        )
        longer = packed + pack_ids(random.integers(0, VOCABULARY, TURN_TOKENS))
        for times, turn in ((first, packed), (next_turn, longer)):
            begin = time.thread_time()
            prompt = RoutedPrompt.from_tokens(turn, BASE_ROOT, PAGE_SIZE)
            hashed = time.thread_time()
            router.send(prompt, router.choose(prompt, answers), number + 1)
            times.append(time.thread_time() - begin)
            if turn is packed:
                hashing.append(hashed - begin)
    p50, p99 = np.percentile(first, [50, 99]) * 1e3
    return {
        "tokens": f"{num_tokens:,}",
        "p50 ms": f"{p50:.3f}",
        "p99 ms": f"{p99:.3f}",
        "of it hashing, p50 ms": f"{np.median(hashing) * 1e3:.3f}",
        "next turn, p99 ms": f"{np.percentile(next_turn, 99) * 1e3:.3f}",
    }


def _store(router: Router, replica: int, sequence: int, packed: bytes) -> None:
    event = BlockStored(
        block_hashes=block_hashes(namespace_hash(), packed, PAGE_SIZE),
        parent_hash=None,
        token_ids=None,
        page_size=PAGE_SIZE,
        salted=False,
    )
    batch = EventBatch(stream=str(replica), sequence=sequence, timestamp=0.0, events=[event])
    router.take_events(replica, [msgspec.msgpack.encode(batch)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["throughput", "latency", "decision"])
    parser.add_argument("--rounds", type=int, default=10, help="of throughput and of latency")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a round of throughput and a side")  # fmt: skip
    parser.add_argument("--pairs", type=int, default=150, help="of requests in a round of latency")
    parser.add_argument("--decisions", type=int, default=1000, help="of the router")
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
    if arguments.only in (None, "decision"):
        rows = [dict(decision(tokens, arguments.decisions)) for tokens in ROUTED_TOKENS]
        print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
