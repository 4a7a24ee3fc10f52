"""Measures what a server's start costs: ``python -m bench.starts --checkouts . ../other``.

CPU seconds of each process until the first answer, of all until they have ended, and the time to
that answer. Checkouts take turns, each with a cache of its own that its first start, which does
not count, has filled. On a busy machine compare minima.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
import psutil

from bench import children
from bench.local_server import START_TIMEOUT_S, comes_alive, free_port
from bench.markdown import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", nargs="+", type=Path, default=[Path()])
    parser.add_argument("--rounds", type=int, default=5)
    arguments, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as caches:
        starts: dict[Path, list[dict[str, float]]] = {one: [] for one in arguments.checkouts}
        for round_number in range(arguments.rounds + 1):
            for number, checkout in enumerate(arguments.checkouts):
                spent = _start(checkout.resolve(), f"{caches}/{number}", flags)
                if round_number:
                    starts[checkout].append(spent)
    for checkout, all_spent in starts.items():
        rows = [
            {"": name, "min": min(each), "median": statistics.median(each), "max": max(each)}
            for name in all_spent[0]
            for each in [[one.get(name, 0.0) for one in all_spent]]
        ]
        print(f"\n{checkout}\n", *markdown(rows), sep="\n")


def _start(checkout: Path, cache: str, flags: list[str]) -> dict[str, float]:
    """Start a server, ask once and stop it; returns seconds by what they are."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "radixrt.launch_server", "--port", str(port), *flags]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    body = {"prompt": "Hello", "max_tokens": 1}
    before, begin = os.times(), time.perf_counter()
    with children.running(
        command, env=environment, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        if not comes_alive(f"{url}/ready", server, START_TIMEOUT_S):
            raise RuntimeError(f"The server of {checkout} did not start.")
        httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        first_answer_s = time.perf_counter() - begin
        spent = _cpu_seconds(psutil.Process(server.pid))
        begin = time.perf_counter()
    after = os.times()
    return spent | {
        "CPU s, with the end": after.children_user
        + after.children_system
        - before.children_user
        - before.children_system,
        "s to the first answer": first_answer_s,
        "s to the end": time.perf_counter() - begin,
    }


def _cpu_seconds(supervisor: psutil.Process) -> dict[str, float]:
    """CPU seconds of each kind of process, and of all."""
    spent: dict[str, float] = defaultdict(float)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        words, times = process.cmdline(), process.cpu_times()
        module = (
            words[words.index("-m") + 1].removeprefix("radixrt.") if "-m" in words else "others"
        )
        spent[f"CPU s, {module}"] += times.user + times.system
        spent["CPU s, others"] += times.children_user + times.children_system
    return dict(sorted(spent.items())) | {"CPU s": sum(spent.values())}


if __name__ == "__main__":
    main()
