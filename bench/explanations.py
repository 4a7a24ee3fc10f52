"""Measures the CPU time of a request in two checkouts: ``python -m bench.explanations --against ../before [--rounds 10] [--quick]``.

Growing chats, whose clients ask for no explanation, against a server of this checkout and one of another: what noting the facts for
explanations costs. Rounds alternate. The promise is a ratio of at most 1.01 over all processes.
"""

import argparse
import contextlib
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import PROCESSES, local_server, server_pids
from bench.markdown import markdown

CHATS, TURNS, OUTPUT_TOKENS = 20, 6, 16
SYSTEM = "You are an assistant who knows all ports of the sea and answers in few words. " * 30
QUESTION = "What is the name of port number {0}, and which ships are there today? " * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a small model")
    arguments = parser.parse_args()
    checkouts = {"before": arguments.against, "after": Path.cwd()}
    spent: dict[tuple[str, str], list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if arguments.quick:
            write_dummy_checkpoint(model, hidden_size=128, num_layers=2)
        else:
            write_dummy_checkpoint(model)
        urls = {}
        for name, checkout in checkouts.items():
            with contextlib.chdir(checkout):  # python -m looks there first
                flags = ("--load-format", "dummy", "--log-level", "warning")
                urls[name] = stack.enter_context(local_server(str(model), *flags))
        for number in range(-1, arguments.rounds):  # the first warms up
            for name, url in urls.items():
                for process, seconds in _round(url, number).items():
                    if number >= 0:
                        spent[name, process].append(seconds)
    print("\n".join(markdown([_row(process, spent) for process in (*PROCESSES, "all")])))


def _round(url: str, number: int) -> dict[str, float]:
    """CPU seconds of each process for a request."""
    processes = {name: psutil.Process(pid) for name, pid in server_pids(url).items()}
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    with httpx.Client(base_url=url, timeout=300) as client:
        for chat in range(CHATS):
            _chat(client, f"{number}.{chat}")
    spent = {
        name: (sum(process.cpu_times()[:2]) - before[name]) / (CHATS * TURNS)
        for name, process in processes.items()
    }
    return spent | {"all": sum(spent.values())}


def _chat(client: httpx.Client, name: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": QUESTION.format(f"{name}.{turn}")})
        body: dict[str, Any] = {"messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}  # fmt: skip
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        messages.append(
            {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
        )


def _row(process: str, spent: dict[tuple[str, str], list[float]]) -> dict[str, str]:
    before, after = (spent[name, process] for name in ("before", "after"))
    ratios = [one / other for one, other in zip(after, before, strict=True) if other]
    return {
        "process": process,
        "before, ms": f"{1e3 * statistics.median(before):.2f}",
        "after, ms": f"{1e3 * statistics.median(after):.2f}",
        "median ratio": f"{statistics.median(ratios):.3f}" if ratios else "",
        "smallest and largest": f"{min(ratios):.3f} to {max(ratios):.3f}" if ratios else "",
    }


if __name__ == "__main__":
    main()
