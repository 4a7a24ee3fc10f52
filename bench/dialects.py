"""Measures what the translators of other APIs cost: ``python -m bench.dialects [--pairs 10] [--requests 200]``.

CPU seconds per request of all processes of a server, for the same prompt and the same answer through chat completions and through
another API, by turns. The ratio of each pair is taken, and the interval of 95 % is that of their mean (Student's t).
"""

import argparse
import asyncio
import statistics
from typing import Any

import httpx
import psutil

from bench.local_server import local_server, server_pids
from bench.markdown import markdown, mean_and_interval

PROMPT = "The owner of Vidur is Noval. What is the owner of Vidur? " * 8
MAX_TOKENS = 64
CONCURRENCY = 8

_HISTORY = [{"role": "user", "content": PROMPT}]
_SHARED: dict[str, Any] = {"model": "demo", "temperature": 0, "ignore_eos": True, "stream": True}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": _HISTORY, "max_tokens": MAX_TOKENS}),
    "responses": ("/v1/responses", {"input": PROMPT, "max_output_tokens": MAX_TOKENS}),
    "responses, not stored": (
        "/v1/responses",
        {"input": PROMPT, "max_output_tokens": MAX_TOKENS, "store": False},
    ),
    "messages": ("/v1/messages", {"messages": _HISTORY, "max_tokens": MAX_TOKENS}),
    "ollama": ("/api/chat", {"messages": _HISTORY, "max_tokens": MAX_TOKENS}),
}
"""Path and body of each API's request."""


async def _send(url: str, name: str, count: int) -> None:
    """Send ``count`` requests, some at a time, and read their streams.

    Raises:
        httpx.HTTPStatusError: a request was refused.
    """
    path, body = BODIES[name]
    slots = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def send() -> None:
            async with slots, client.stream("POST", path, json=_SHARED | body) as response:
                response.raise_for_status()
                async for _ in response.aiter_raw():
                    pass

        await asyncio.gather(*(send() for _ in range(count)))


def cpu_seconds_per_request(url: str, name: str, count: int) -> float:
    """Of all processes of the server."""
    processes = [psutil.Process(pid) for pid in server_pids(url).values()]

    def total() -> float:
        times = [process.cpu_times() for process in processes]
        return sum(one.user + one.system for one in times)

    before = total()
    asyncio.run(_send(url, name, count))
    return (total() - before) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200, help="of each half of a pair")
    args = parser.parse_args()
    rows = []
    with local_server("demo", "--served-model-name", "demo", "--log-level", "warning") as url:
        for name in BODIES:
            asyncio.run(_send(url, name, CONCURRENCY))  # warm up
        for name in [name for name in BODIES if name != "chat"]:
            pairs = []
            for number in range(args.pairs):
                order = ("chat", name) if number % 2 else (name, "chat")
                cost = {one: cpu_seconds_per_request(url, one, args.requests) for one in order}
                pairs.append((cost["chat"], cost[name]))
            ratios = [theirs / chat for chat, theirs in pairs]
            rows.append(
                {
                    "API": name,
                    "chat, ms": f"{statistics.mean(chat for chat, _ in pairs) * 1e3:.2f}",
                    "API, ms": f"{statistics.mean(theirs for _, theirs in pairs) * 1e3:.2f}",
                    "ratio": mean_and_interval(ratios),
                }
            )
    print("\n".join(markdown(rows)))


if __name__ == "__main__":
    main()
