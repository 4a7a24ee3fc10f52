"""Measures the first token of one API key while 100 requests of another wait: ``python -m bench.fairness [--quick]``.

Bob sends short prompts one after the other: on an idle server, beside a queue of Alice's that never gets empty, and, for comparison, with Alice's
key beside the same queue, where his requests wait among hers. The ratio of the first two is the promise: at most 2.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import local_server
from bench.markdown import markdown
from radixrt.base.api_keys import digest_of

RUNNING = 8
"""Requests of Alice's that run (--max-running-requests); the slots are hers when Bob comes."""
WAITING = 100
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
VOCABULARY = 300
"""Token ids of prompts are below it in every model."""
GIVE_UP_S = 300.0

KEYS = ("alice", "bob")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20, help="of Bob's in each state")
    parser.add_argument("--quick", action="store_true", help="a small model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, keys = Path(folder, "model"), Path(folder, "keys.json")
        model.mkdir()
        if arguments.quick:
            write_dummy_checkpoint(model, hidden_size=128, num_layers=2)
        else:
            write_dummy_checkpoint(model)
        entries = [{"name": name, "hash": digest_of(name)} for name in KEYS]
        entries.append({"name": "operator", "hash": digest_of("operator"), "role": "admin"})
        keys.write_text(json.dumps({"keys": entries}))
        flags = [
            "--api-keys",
            str(keys),
            "--max-running-requests",
            str(RUNNING),
            "--load-format",
            "dummy",
        ]
        with local_server(str(model), *flags, "--log-level", "warning") as url:
            rows = asyncio.run(_measure(url, arguments.requests))
    print("\n".join(markdown(rows)))


async def _measure(url: str, count: int) -> list[dict[str, Any]]:
    numbers = itertools.count()
    client = httpx.AsyncClient(
        base_url=url, timeout=GIVE_UP_S, limits=httpx.Limits(max_connections=None)
    )
    async with client:
        await _first_tokens(client, numbers, "bob", 3)  # warm up
        alone = await _first_tokens(client, numbers, "bob", count)
        async with _flood(client, numbers):
            beside = await _first_tokens(client, numbers, "bob", count)
            among = await _first_tokens(client, numbers, "alice", max(2, count // 5))
    states = {"idle server": alone, "Alice's queue": beside, "the same key as Alice": among}
    base = statistics.median(alone)
    return [
        {
            "Bob beside": state,
            "requests": len(seen),
            "TTFT p50, ms": f"{1e3 * statistics.median(seen):.1f}",
            "longest": f"{1e3 * max(seen):.1f}",
            "ratio of p50": f"{statistics.median(seen) / base:.2f}",
        }
        for state, seen in states.items()
    ]


@asynccontextmanager
async def _flood(client: httpx.AsyncClient, numbers: Iterator[int]) -> AsyncIterator[None]:
    """Keep ``WAITING`` requests of Alice's in the queue."""

    async def ask_again_and_again() -> None:
        while True:
            body = _body(next(numbers), OUTPUT_TOKENS)
            (
                await client.post("/v1/completions", json=body, headers=_headers("alice"))
            ).raise_for_status()

    asking = [asyncio.create_task(ask_again_and_again()) for _ in range(WAITING + RUNNING)]
    try:
        while await _num_waiting(client) < 0.9 * WAITING:
            await asyncio.sleep(0.05)
        yield
        for task in asking:
            if task.done():
                task.result()
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def _num_waiting(client: httpx.AsyncClient) -> int:
    info = await client.get("/get_server_info", headers=_headers("operator"))
    return int(info.raise_for_status().json()["stats"]["waiting"])


async def _first_tokens(
    client: httpx.AsyncClient, numbers: Iterator[int], key: str, count: int
) -> list[float]:
    """Seconds to the first token of requests one after the other."""
    seen = []
    for _ in range(count):
        body = _body(next(numbers), 4) | {"stream": True}
        begin = time.perf_counter()
        async with client.stream(
            "POST", "/v1/completions", json=body, headers=_headers(key)
        ) as response:
            response.raise_for_status()
            lines = response.aiter_lines()
            await anext(lines)
            seen.append(time.perf_counter() - begin)
            async for _ in lines:
                pass
    return seen


def _body(number: int, max_tokens: int) -> dict[str, Any]:
    """No two prompts share a page."""
    tokens = np.random.default_rng(number).integers(3, VOCABULARY, PROMPT_TOKENS)
    return {
        "prompt": tokens.tolist(),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


def _headers(key: str) -> dict[str, str]:
    return {"x-api-key": key}


if __name__ == "__main__":
    main()
