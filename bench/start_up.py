"""How long does radixrt take to start? ``python -m bench.start_up [--rounds 5]``. Medians and ranges, in seconds.

The server's time is from the command to the first answer of the built-in model, as ``curl`` in a loop would see it.
"""

import argparse
import contextlib
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial

from bench.markdown import markdown, median_and_range
from radixrt.bench.local_server import free_port

TIMEOUT_S = 120


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
    port = free_port()
    begin = time.perf_counter()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "radixrt.cli",
            "serve",
            "--port",
            str(port),
            "--log-level",
            "warning",
        ],
        stdout=subprocess.DEVNULL,
    )
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=b'{"model": "demo", "prompt": "Hello", "max_tokens": 1}',
        headers={"Content-Type": "application/json"},
    )
    try:
        while server.poll() is None and time.perf_counter() - begin < TIMEOUT_S:
            with contextlib.suppress(OSError), urllib.request.urlopen(request) as answer:
                answer.read()
                return time.perf_counter() - begin
            time.sleep(0.02)
    finally:
        server.terminate()
        server.wait()
    raise SystemExit("The server did not answer.")


if __name__ == "__main__":
    main()
