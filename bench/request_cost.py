"""Measures what a feature costs, in CPU seconds of all processes for a request: ``python -m bench.request_cost {tracing,typed-events,against}``.

    python -m bench.request_cost tracing                    with --otlp-endpoint against without; growing chats
    python -m bench.request_cost typed-events               with "stream_values" against without; streams of JSON
    python -m bench.request_cost against ../before          this checkout against another one; growing chats

Both sides take turns, the first turn warms up. The result is the mean ratio of the pairs with its 95 % interval.
"""

import argparse
import contextlib
import statistics
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from bench.constrained import ENDLESS
from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import PROCESSES, CpuClock, local_server
from bench.markdown import markdown

SYSTEM = "You are an assistant who knows all ports of the sea and answers in few words. " * 30
QUESTION = "What is the name of port number {0}, and which ships are there today? " * 4
CHATS, TURNS, ANSWERS, OUTPUT_TOKENS = 5, 6, 8, 64
FLAGS = ("--load-format", "dummy", "--log-level", "warning")
MIN_SECONDS = 0.0005
"""Of a process for a request; below it a ratio says nothing, because the system counts in hundredths of a second."""

Turn = Callable[[httpx.Client, str], int]
"""Sends the requests of one turn, given its name; returns their number."""


@dataclass(frozen=True)
class Side:
    name: str
    turn: Turn
    flags: tuple[str, ...] = ()
    checkout: Path = Path(".")

    def measure(self, url: str, name: str) -> dict[str, float]:
        """CPU seconds of each process for a request."""
        clock = CpuClock([url])
        before = clock.by_process()
        with httpx.Client(base_url=url, timeout=300) as client:
            num_requests = self.turn(client, name)
        spent = {name: (s - before[name]) / num_requests for name, s in clock.by_process().items()}
        return spent | {"all": sum(spent.values())}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.request_cost", description="Measures the CPU time of a feature."
    )
    parser.add_argument("feature", choices=("tracing", "typed-events", "against"))
    parser.add_argument("checkout", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    arguments = parser.parse_args()
    if (arguments.feature == "against") != (arguments.checkout is not None):
        parser.error("against, and nothing else, needs the other checkout")
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_dummy_checkpoint(
            model, hidden_size=arguments.hidden_size, num_layers=arguments.num_layers
        )
        sides = _sides(arguments, stack)
        urls = {}
        for side in sides:
            with contextlib.chdir(side.checkout):  # python -m looks there first
                urls[side.name] = stack.enter_context(local_server(str(model), *FLAGS, *side.flags))
        spent: dict[tuple[str, str], list[float]] = defaultdict(list)
        for number in range(-1, arguments.rounds):
            for side in sides if number % 2 else sides[::-1]:
                for process, seconds in side.measure(urls[side.name], str(number)).items():
                    if number >= 0:
                        spent[side.name, process].append(seconds)
    print("\n".join(markdown([_row(process, sides, spent) for process in (*PROCESSES, "all")])))


def _sides(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[Side, Side]:
    match arguments.feature:
        case "tracing":
            flags = ("--otlp-endpoint", stack.enter_context(_collector()))
            return Side("without", _chats), Side("with", _chats, flags)
        case "typed-events":
            return Side("without", _json_streams({})), Side("with", _json_streams({"stream_values": True}))  # fmt: skip
        case _:
            return Side("before", _chats, checkout=arguments.checkout), Side("after", _chats)


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    """Takes traces over HTTP and drops them. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


def _chats(client: httpx.Client, name: str) -> int:
    for chat in range(CHATS):
        _chat(client, f"{name}.{chat}")
    return CHATS * TURNS


def _chat(client: httpx.Client, name: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": QUESTION.format(f"{name}.{turn}")})
        body: dict[str, Any] = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}  # fmt: skip
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})


def _json_streams(fields: dict[str, Any]) -> Turn:
    response_format = {"type": "json_schema", "json_schema": {"name": "people", "schema": ENDLESS}}

    def turn(client: httpx.Client, name: str) -> int:
        for number in range(ANSWERS):
            body = {
                "messages": [{"role": "user", "content": f"Person {number}"}],
                "response_format": response_format,
                "max_tokens": 4 * OUTPUT_TOKENS,
                "seed": number,
                "stream": True,
                **fields,
            }
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                text = response.read().decode()
            assert ('"value.completed"' in text) == bool(fields)
        return ANSWERS

    return turn


def _row(
    process: str, sides: tuple[Side, Side], spent: dict[tuple[str, str], list[float]]
) -> dict[str, str]:
    base, other = (np.array(spent[side.name, process]) for side in sides)
    row = {"process": process} | {
        f"{side.name}, ms": f"{1e3 * statistics.median(spent[side.name, process]):.2f}"
        for side in sides
    }
    if base.min() < MIN_SECONDS:
        return row | {"ratio": "", "95 % interval": ""}
    ratios = other / base
    error = 1.96 * ratios.std(ddof=1) / np.sqrt(len(ratios)) if len(ratios) > 1 else np.inf
    mean = ratios.mean()
    return row | {"ratio": f"{mean:.3f}", "95 % interval": f"{mean - error:.3f} to {mean + error:.3f}"}  # fmt: skip


if __name__ == "__main__":
    main()
