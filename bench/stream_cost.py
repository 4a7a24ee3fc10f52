"""Measures the CPU time of a streamed token in each process: ``python -m bench.stream_cost``.

A server streams many chats at a time from a model of one small layer. So nearly nothing is
computed, and the processes beside the worker have as much to do as they have beside a GPU. The
result is the CPU time of each process, divided by the tokens.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from tokenizers import Tokenizer

from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import PROCESSES, CpuClock, local_server
from radixrt.base.config import DEMO_MODEL
from radixrt.base.errors import ConfigError
from radixrt.bench.arguments import positive
from radixrt.bench.output import print_rows
from radixrt.models.checkpoint import resolve_model_path

FLAGS = ("--load-format", "dummy", "--log-level", "warning", "--max-queue-seconds", "0")
END_OF_STREAM = b"data: [DONE]"


@dataclass(frozen=True)
class StreamCost:
    """One round."""

    streams: int
    tokens: int
    events: int
    """Server-sent events that the clients got. One has several tokens if the server falls behind."""
    tokens_per_s: float
    api_us: float
    """CPU time of the api process for each token, in microseconds; the others likewise."""
    tokenizer_us: float
    scheduler_us: float
    worker_us: float


def measure(url: str, streams: int, output_tokens: int) -> StreamCost:
    """Stream answers of ``output_tokens`` each, all at a time."""
    clock = CpuClock([url])
    before, begin = clock.by_process(), time.perf_counter()
    events = asyncio.run(_stream_all(url, streams, output_tokens))
    seconds, after = time.perf_counter() - begin, clock.by_process()
    tokens = streams * output_tokens
    each = {name: 1e6 * (after[name] - before[name]) / tokens for name in PROCESSES}
    return StreamCost(
        streams=streams,
        tokens=tokens,
        events=events,
        tokens_per_s=tokens / seconds,
        api_us=each["api"],
        tokenizer_us=each["tokenizer"],
        scheduler_us=each["scheduler"],
        worker_us=each["worker"],
    )


async def _stream_all(url: str, streams: int, output_tokens: int) -> int:
    streaming = (_stream(url, number, output_tokens) for number in range(streams))
    return sum(await asyncio.gather(*streaming))


async def _stream(url: str, number: int, output_tokens: int) -> int:
    """One answer; returns the number of its events. Nothing is parsed, so that the client needs
    little of the machine's time.

    Raises:
        ConfigError: the server refused the request.
    """
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"Question {number}"}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": number,
            "stream": True,
        }
    )
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
        prog="python -m bench.stream_cost", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--streams", type=positive, default=256, metavar="N", help="answers at a time (default: %(default)s)")  # fmt: skip
    parser.add_argument("--output-tokens", type=positive, default=200, metavar="N", help="tokens of each answer (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="rounds, after one to warm up (default: %(default)s)")  # fmt: skip
    arguments = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(resolve_model_path(DEMO_MODEL) / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_dummy_checkpoint(
            Path(folder),
            hidden_size=64,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            vocab_size=tokenizer.get_vocab_size(),
            tokenizer=tokenizer,
        )
        flags = (*FLAGS, "--max-running-requests", str(arguments.streams))
        with local_server(str(model_dir), *flags) as url:
            measure(url, arguments.streams, 8)
            rounds = [
                measure(url, arguments.streams, arguments.output_tokens)
                for _ in range(arguments.rounds)
            ]
    print_rows(Console(), "CPU time of a streamed token (µs)", rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
