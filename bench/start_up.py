"""Measures how long radixrt takes to start: ``python -m bench.start_up [--rounds 5]``. Medians and ranges, in seconds.

The server's time is from the command to the first answer of the built-in model.
"""

import argparse
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial

from bench.local_server import local_server
from bench.markdown import markdown, median_and_range


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    starts: dict[str, Callable[[], float]] = {
        "python -c pass": partial(_run, "-c", "pass"),
        "import radixrt.lang": partial(_run, "-c", "import radixrt.lang"),
        "radixrt --help": partial(_run, "-m", "radixrt.cli", "--help"),
        "radixrt serve, to the first answer": _serve,
    }
    times: dict[str, list[float]] = {name: [] for name in starts}
    for _ in range(rounds):
        for name, start in starts.items():
            times[name].append(start())
    rows = [{"": name, "s": median_and_range(each, 2)} for name, each in times.items()]
    print("\n".join(markdown(rows)))


def _run(*arguments: str) -> float:
    """Seconds that Python takes with these arguments."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def _serve() -> float:
    """Seconds from the command to an answer."""
    begin = time.perf_counter()
    with local_server("demo", "--log-level", "warning") as url:
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=b'{"model": "demo", "prompt": "Hello", "max_tokens": 1}',
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            answer.read()
        return time.perf_counter() - begin


if __name__ == "__main__":
    main()
