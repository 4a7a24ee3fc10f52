"""The main benchmarks once: ``make bench``. Writes a markdown report with the machine, the versions and the spread.

    python -m bench.run_all [--report FILE] [--only NAME ...] [--quick]

Takes half an hour on two cores, or twice that where the peers of bench.peers_cpu are installed (``make peers``). Run it on a quiet
machine; a number beside other jobs means nothing.
"""

import argparse
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

import radixrt_kernels
from bench import children

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "radixrt"
REPORT = Path("docs/internals/benchmark_report.md")
PACKAGES = ("torch", "transformers", "llguidance", "outlines-core", "numpy")


@dataclass(frozen=True)
class Benchmark:
    name: str
    what: str
    command: str
    quick: str
    """Further flags that only see whether it runs."""


BENCHMARKS = (
    Benchmark("start-up", "From a command to what it is for, seconds.",
        "-m bench.start_up --rounds 5", "--rounds 1"),
    Benchmark("kernels", "Each kernel beside PyTorch and the machine's limits; best of many runs.",
        "-m bench.kernels", "--only rotate"),
    Benchmark("overhead", "Time of the engine without the model: of the scheduler in microseconds per step, and of all processes in milliseconds.",
        "-m bench.overhead", "--plan-steps 50 --output-tokens 10 --num-layers 2"),
    Benchmark("constrained", "What grammars cost beside free answers, and what forced tokens save.",
        "-m bench.constrained", "--hidden-size 128 --num-layers 2 --rounds 1 --concurrency 1"),
    Benchmark("speculation", "Drafts beside none by turns, on the built-in model padded to 0.4 B parameters; and the time to draft.",
        "-m bench.speculation --padded {cache}/padded-demo", "--quick --rounds 1 --padded '' --only repeated"),
    Benchmark("radix tree", "The radix tree alone, medians of 21, and its memory.",
        "-m bench.radix_tree", "--nodes 100 --tokens 1000 --rounds 2"),
    Benchmark("peers", "Other engines on the same checkpoint; medians (ranges) of three alternating rounds. See performance.md.",
        "-m bench.peers_cpu --engines all", "--quick"),
)  # fmt: skip


def main() -> None:
    arguments = _parse()
    chosen = [
        benchmark
        for benchmark in BENCHMARKS
        if benchmark.name in (arguments.only or [benchmark.name])
    ]
    report = [
        *_head(),
        *(f"- [{each.name}](#{each.name.replace(' ', '-')})" for each in chosen),
        "",
    ]
    failed = []
    for benchmark in chosen:
        print(f"{time.strftime('%H:%M')} {benchmark.name}", flush=True)
        section, ok = _run(benchmark, arguments.quick)
        report += section
        failed += [] if ok else [benchmark.name]
        arguments.report.write_text("\n".join(report))
    print(f"The report is in {arguments.report}.")
    if failed:
        sys.exit(f"These failed: {', '.join(failed)}.")


def _parse() -> argparse.Namespace:
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.run_all",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small and few: does it run?")
    return parser.parse_args()


def _head() -> list[str]:
    native = radixrt_kernels.native
    kernels = f"native kernels for {native.isa()}" if native else "no native kernels"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return [
        "# Benchmark report",
        "",
        "Written by `make bench`. [benchmarks.md](benchmarks.md) says what is measured and how, [performance.md](performance.md) what follows from it.",
        "",
        f"- {time.strftime('%Y-%m-%d')}, commit {commit}",
        f"- {_processor()}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB, {kernels}",
        f"- {platform.system()} {platform.release()}, Python {platform.python_version()}, {versions}",
        "",
    ]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _run(benchmark: Benchmark, quick: bool) -> tuple[list[str], bool]:
    """The section of one benchmark, and whether it ran to its end."""
    arguments = benchmark.command + (f" {benchmark.quick}" if quick else "")
    load, begin = os.getloadavg()[0], time.monotonic()
    done = children.run(
        [sys.executable, *shlex.split(arguments.format(cache=CACHE))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "160", "GOMP_SPINCOUNT": "2000"},
    )
    seconds = time.monotonic() - begin
    section = [
        f"## {benchmark.name}",
        "",
        benchmark.what,
        "",
        f"`python {arguments.format(cache='DIR')}`; {seconds:.0f} s, load before it {load:.1f}.",
        "",
        *_shown(done.stdout),
        "",
    ]
    if done.returncode:
        section += [f"It failed, with status {done.returncode}.", ""]
    return section, not done.returncode


def _shown(output: str) -> list[str]:
    """Tables as they are, other text as text."""
    lines = [line.rstrip() for line in output.strip().splitlines()]
    if any(line.startswith("|") and "--" in line for line in lines):
        return lines
    return ["```text", *lines, "```"]


if __name__ == "__main__":
    main()
