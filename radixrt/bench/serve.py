"""``radixrt bench serve``: measures latencies and throughput of any server with an OpenAI base
URL."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from radixrt.base.errors import ConfigError
from radixrt.bench.client import RequestRecord, Target, converse
from radixrt.bench.datasets import read_dataset
from radixrt.bench.report import (
    check_folders,
    compare_runs,
    console_beside,
    print_summary,
    request_rows,
    summarize,
    write_json,
)
from radixrt.bench.workloads import Conversation, WorkloadSettings, make_workload

CONCURRENCY = 16
"""Concurrent requests of a closed loop, unless a flag says otherwise."""


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write; the exit status is 1 if any request failed."""
    if arguments.rate is not None and not arguments.rate > 0:
        raise ConfigError("--rate must be above 0.")
    console = console_beside(arguments.json)
    if arguments.compare:
        before, after = arguments.compare
        compare_runs(Path(before), Path(after), console)
        return 0
    check_folders(arguments.json, arguments.plot)
    records = asyncio.run(_measure(arguments))
    summary = summarize(records, dict(arguments.slo or ()))
    print_summary(summary, console, _title(arguments))
    document = {
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("run", "api_key")},
        "summary": summary.as_json(),
        "requests": request_rows(records),
    }
    write_json(arguments.json, document)
    if arguments.plot:
        from radixrt.bench.plot import plot_run

        plot_run(records, summary, _title(arguments), Path(arguments.plot))
        console.print(f"Plot: {arguments.plot}")
    return 1 if summary.failed or not summary.succeeded else 0


def _title(arguments: argparse.Namespace) -> str:
    if arguments.rate is not None:
        load = f"{arguments.rate:g} per second"
    elif arguments.concurrency is None and arguments.dataset:
        load = "as recorded, or concurrency 16"
    else:
        load = f"concurrency {arguments.concurrency or CONCURRENCY}"
    name = Path(arguments.dataset).name if arguments.dataset else arguments.workload
    return f"{name}, {arguments.num_prompts} requests, {load}"


async def _measure(arguments: argparse.Namespace) -> list[RequestRecord]:
    key = arguments.api_key or os.environ.get("RADIXRT_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # No limit of connections: the load, not the client's pool, decides how many requests there are.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        headers=headers, timeout=arguments.timeout, limits=limits
    ) as client:
        target, vocab_size = await _discover(client, arguments)
        flags = [field.name for field in fields(WorkloadSettings) if field.name != "name"]
        given = {flag: getattr(arguments, flag) for flag in flags}
        settings = WorkloadSettings(arguments.workload, **given)
        # Single requests that share nothing with the workload.
        other = {"num_prompts": arguments.warmup, "seed": settings.seed + 2**32}
        warmup = make_workload(replace(settings, name="random", **other), vocab_size)
        conversations = (
            read_dataset(
                Path(arguments.dataset),
                limit=arguments.num_prompts,
                turns=arguments.turns,
                output_len=arguments.output_len,
                speed=arguments.trace_speed,
                vocab_size=vocab_size,
            )
            if arguments.dataset
            else make_workload(settings, vocab_size)
        )
        if arguments.endpoint != "chat" and any(c.messages is not None for c in conversations):
            raise ConfigError("--dataset holds chat requests: add --endpoint chat.")
        await _send_all(client, target, warmup, closed_loop(4), lambda record: None)
        if arguments.flush_cache:
            response = await client.post(f"{_root(arguments.url)}/flush_cache")
            if response.status_code != 200:
                raise ConfigError(f"--flush-cache: the server answers {response.status_code}.")
        pace = _pace(arguments, conversations)
        records: list[RequestRecord] = []
        with _progress() as progress:
            bar = progress.add_task("", total=sum(len(c.turns) for c in conversations), tokens=0)

            def collect(record: RequestRecord) -> None:
                records.append(record)
                shown = progress.tasks[bar].fields["tokens"]
                progress.update(bar, advance=1, tokens=shown + record.output_tokens)

            await _send_all(client, target, conversations, pace, collect)
        return records


def _pace(arguments: argparse.Namespace, conversations: Sequence[Conversation]) -> "Throttle":
    if arguments.rate is not None:
        return open_loop(arguments.rate, arguments.seed, arguments.burstiness)
    arrivals = [c.arrival_s for c in conversations if c.arrival_s is not None]
    if arguments.concurrency is None and len(arrivals) == len(conversations):
        return recorded_times(arrivals)
    return closed_loop(arguments.concurrency or CONCURRENCY)


def _progress() -> Progress:
    return Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]:,} output tokens"),
        console=Console(stderr=True),
        transient=True,
    )


async def _discover(
    client: httpx.AsyncClient, arguments: argparse.Namespace
) -> tuple[Target, int | None]:
    """Ask the server for the values that the flags do not set.

    Returns:
        The target, and the size of the vocabulary if prompts are to be token ids.
    """
    base_url = arguments.url.rstrip("/")
    if not urlsplit(base_url).path:  # another path than /v1 stays
        base_url += "/v1"
    model = arguments.model
    if model is None:
        listed = await _get_json(client, f"{base_url}/models")
        if not listed or not listed.get("data"):
            raise ConfigError(
                f"{base_url}/models names no model; is the server up? Or use --model."
            )
        model = listed["data"][0]["id"]
    info = await _get_json(client, f"{_root(base_url)}/get_model_info") or {}
    vocab_size = arguments.vocab_size or info.get("vocab_size")
    if arguments.prompts == "text" or arguments.endpoint == "chat":
        vocab_size = None
    elif arguments.prompts == "tokens" and vocab_size is None:
        raise ConfigError("--prompts tokens: the server does not say its --vocab-size; give it.")
    target = Target(
        base_url=base_url,
        model=model,
        endpoint=arguments.endpoint,
        ignore_eos=not arguments.respect_eos,
        return_token_ids=bool(info) or vocab_size is not None,
    )
    return target, vocab_size


def _root(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")


async def _get_json(client: httpx.AsyncClient, url: str) -> dict[str, Any] | None:
    """None where the server has no such page."""
    try:
        response = await client.get(url)
    except httpx.HTTPError as error:
        raise ConfigError(f"Cannot reach {url}: {error or type(error).__name__}") from error
    if response.status_code in (401, 403):
        raise ConfigError(f"{url} answers {response.status_code}; is --api-key right?")
    try:
        document = response.json() if response.status_code == 200 else None
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


Throttle = Callable[[Sequence[Callable[[], Awaitable[None]]]], Awaitable[None]]
"""Runs conversations, each at the time it is due."""


def closed_loop(concurrency: int) -> Throttle:
    """The next conversation starts when one of ``concurrency`` others has ended."""

    async def run_all(conversations: Sequence[Callable[[], Awaitable[None]]]) -> None:
        waiting = iter(conversations)

        async def client() -> None:
            for converse_once in waiting:
                await converse_once()

        await asyncio.gather(*(client() for _ in range(concurrency)))

    return run_all


def open_loop(rate: float, seed: int, burstiness: float = 1.0) -> Throttle:
    """Conversations start at random times, whether the server keeps up or not.

    Args:
        rate: mean starts per second.
        burstiness: shape of the gamma distribution of the gaps; 1 is a Poisson process.
    """

    async def run_all(conversations: Sequence[Callable[[], Awaitable[None]]]) -> None:
        rng = np.random.default_rng(seed)
        gaps = rng.gamma(burstiness, 1 / (rate * burstiness), size=len(conversations))
        await recorded_times((np.cumsum(gaps) - gaps[0]).tolist())(conversations)

    return run_all


def recorded_times(arrivals: Sequence[float]) -> Throttle:
    """Each conversation starts at its time, in seconds, whether the server keeps up or not."""

    async def run_all(conversations: Sequence[Callable[[], Awaitable[None]]]) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()

        async def start_at(due: float, converse_once: Callable[[], Awaitable[None]]) -> None:
            await asyncio.sleep(start + due - loop.time())
            await converse_once()

        await asyncio.gather(
            *(start_at(t, c) for t, c in zip(arrivals, conversations, strict=True))
        )

    return run_all


async def _send_all(
    client: httpx.AsyncClient,
    target: Target,
    conversations: Sequence[Conversation],
    pace: Throttle,
    collect: Callable[[RequestRecord], None],
) -> None:
    def bound(number: int, conversation: Conversation) -> Callable[[], Awaitable[None]]:
        async def converse_once() -> None:
            async for record in converse(client, target, number, conversation):
                collect(record)

        return converse_once

    await pace([bound(number, each) for number, each in enumerate(conversations)])
