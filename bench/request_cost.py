"""Measures the CPU time of a streamed token in each process: ``python -m bench.request_cost``.

A server streams many chats at a time from a model of one small layer. So nearly nothing is
computed, and the processes beside the worker have as much to do as they have beside a GPU. With
``--against``, a server of another checkout is measured by turns with that of this one; the ratio is
the mean of the pairs with its 95 % interval.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import PROCESSES, CpuClock, local_server
from bench.markdown import markdown, mean_and_interval
from radixrt.base.config import DEMO_MODEL
from radixrt.base.errors import ConfigError
from radixrt.bench.arguments import positive
from radixrt.models.checkpoint import resolve_model_path

FLAGS = ("--load-format", "dummy", "--log-level", "warning", "--max-queue-seconds", "0")
END_OF_STREAM = b"data: [DONE]"
MIN_US = 0.5
"""Below this, a ratio says nothing: the system counts time in hundredths of a second."""

Costs = dict[str, list[float]]
"""Numbers of each round, by process and by what else is counted."""


def measure(url: str, streams: int, output_tokens: int, costs: Costs) -> None:
    """Stream answers of ``output_tokens`` each, all at a time, and add the costs of a token."""
    clock = CpuClock([url])
    before, begin = clock.by_process(), time.perf_counter()
    events = asyncio.run(_stream_all(url, streams, output_tokens))
    seconds, after = time.perf_counter() - begin, clock.by_process()
    tokens = streams * output_tokens
    spent = {f"{name}, µs": 1e6 * (after[name] - before[name]) / tokens for name in PROCESSES}
    spent["all, µs"] = sum(spent.values())
    for name, value in {**spent, "tokens/s": tokens / seconds, "events/token": events / tokens}.items():  # fmt: skip
        costs.setdefault(name, []).append(value)


async def _stream_all(url: str, streams: int, output_tokens: int) -> int:
    streaming = (_stream(url, number, output_tokens) for number in range(streams))
    return sum(await asyncio.gather(*streaming))


async def _stream(url: str, number: int, output_tokens: int) -> int:
    """Request one answer; returns the number of its events, of which one has several tokens if the
    server falls behind.

    Nothing is parsed, so that the client needs little of the machine's time.

    Raises:
        ConfigError: the server refused the request.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    messages = [{"role": "user", "content": f"Question {number}"}]
    length = {"max_tokens": output_tokens, "ignore_eos": True}
    body = json.dumps({"messages": messages, **length, "seed": number, "stream": True})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
    first, end, events = b"", b"", 0
    while data := await reader.read(1 << 16):
        first = first or data
        events += data.count(b"data: ")
        end = (end + data)[-64:]
    writer.close()
    if END_OF_STREAM not in end:
        raise ConfigError(f"The stream broke off: {first[:300]!r}")
    return events


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.request_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout to compare this one with")  # fmt: skip
    parser.add_argument("--streams", type=positive, default=256, metavar="N", help="answers at a time (default: %(default)s)")  # fmt: skip
    parser.add_argument("--output-tokens", type=positive, default=200, metavar="N", help="tokens of each answer (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="rounds, after one to warm up (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args(argv)
    checkouts = {"this checkout": Path()}
    if arguments.against:
        checkouts = {"the other": arguments.against, **checkouts}
    tokenizer = Tokenizer.from_file(str(resolve_model_path(DEMO_MODEL) / "tokenizer.json"))
    shape: dict[str, Any] = {"hidden_size": 64, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_dummy_checkpoint(
            model, **shape, vocab_size=tokenizer.get_vocab_size(), tokenizer=tokenizer
        )
        urls = {}
        flags = (*FLAGS, "--max-running-requests", str(arguments.streams))
        for name, checkout in checkouts.items():
            with contextlib.chdir(checkout):  # python -m looks there first
                urls[name] = stack.enter_context(local_server(str(model), *flags))
        for url in urls.values():
            measure(url, arguments.streams, 8, {})
        costs: dict[str, Costs] = {name: {} for name in urls}
        for number in range(arguments.rounds):
            for name, url in list(urls.items())[:: 1 if number % 2 else -1]:
                measure(url, arguments.streams, arguments.output_tokens, costs[name])
    print("\n".join(markdown([_row(figure, costs) for figure in costs["this checkout"]])))
    return 0


def _row(figure: str, costs: dict[str, Costs]) -> dict[str, str]:
    sides = [each[figure] for each in costs.values()]
    row = {"": figure} | {
        name: f"{statistics.median(each[figure]):,.2f}" for name, each in costs.items()
    }
    if len(sides) > 1:
        counts = min(map(min, sides)) >= MIN_US
        ratios = [after / before for before, after in zip(*sides, strict=True)] if counts else []
        row["ratio"] = mean_and_interval(ratios) if ratios else ""
    return row


if __name__ == "__main__":
    sys.exit(main())
