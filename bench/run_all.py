"""All benchmarks once: ``make bench``. Writes a markdown report with the machine and the versions.

    python bench/run_all.py [--report FILE] [--quick]

Takes some minutes on two cores. Run it on a quiet machine; a number beside other jobs means nothing.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from radixrt.bench.local_server import local_server

RADIXRT = [sys.executable, "-m", "radixrt.cli"]
WORKLOADS = {
    "shared-prefix": [
        "--groups",
        "4",
        "--prefix-len",
        "512",
        "--input-len",
        "32",
        "--output-len",
        "32",
    ],
    "random": ["--input-len", "256", "--output-len", "32"],
    "multi-turn": ["--turns", "4", "--input-len", "48", "--output-len", "32", "--prefix-len", "64"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--report", type=Path, default=Path("bench-report.md"), help="default: %(default)s"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model and few requests: does it run?"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = [
            *head(),
            *overhead(Path(folder), arguments.quick),
            *serving(Path(folder), arguments.quick),
        ]
    arguments.report.write_text("\n".join(report) + "\n")
    print(f"\nThe report is in {arguments.report}.")


def head() -> list[str]:
    import torch
    import transformers

    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in cpuinfo.read_text().splitlines()
            if "model name" in line
        ]
        cpu = names[0] if names else cpu
    return [
        "# Benchmarks",
        "",
        f"{time.strftime('%Y-%m-%d')}, {cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; by `make bench`, one run each.",
        "",
    ]


def overhead(folder: Path, quick: bool) -> list[str]:
    output = folder / "overhead.json"
    flags = ["--plan-steps", "100", "--output-tokens", "20", "--num-layers", "2"] if quick else []
    subprocess.run([*RADIXRT, "bench", "overhead", "--json", str(output), *flags], check=True)
    tables = json.loads(output.read_text())
    lines = ["## `radixrt bench overhead`", ""]
    for title, rows in (
        ("The scheduler, µs a step", tables["planning_us"]),
        ("The scheduler while requests wait, µs a step", tables["queueing_us"]),
        ("The engine, ms a step", tables["engine_ms"]),
    ):
        lines += [f"{title}:", "", *markdown(rows), ""]
    return lines


def serving(folder: Path, quick: bool) -> list[str]:
    shape = ["--hidden-size", "128", "--num-layers", "2"] if quick else []
    model = folder / "model"
    subprocess.run([*RADIXRT, "bench", "model", str(model), *shape], check=True)
    rows = []
    with local_server(str(model), "--load-format", "dummy") as url:
        for workload, flags in WORKLOADS.items():
            output = folder / f"{workload}.json"
            count = "8" if quick else "32"
            command = [
                *RADIXRT,
                "bench",
                "serve",
                "--base-url",
                f"{url}/v1",
                "--workload",
                workload,
                *flags,
            ]
            subprocess.run(
                [*command, "--num-prompts", count, "--flush-cache", "--json", str(output)],
                check=True,
            )
            summary = json.loads(output.read_text())["summary"]
            rows.append(
                {
                    "workload": workload,
                    "output tokens/s": summary["output_tokens_per_s"],
                    "TTFT p50 ms": summary["ttft_ms"]["p50"],
                    "TTFT p99 ms": summary["ttft_ms"]["p99"],
                    "ITL p50 ms": summary["itl_ms"]["p50"],
                    "ITL p99 ms": summary["itl_ms"]["p99"],
                    "prompt tokens": summary["prompt_tokens"],
                    "cached tokens": summary["cached_tokens"],
                }
            )
    parameters = "a small model" if quick else "the 0.5 B model of `radixrt bench model`, bfloat16"
    return [f"## `radixrt bench serve`, {parameters}, concurrency 16", "", *markdown(rows)]


def markdown(rows: list[dict]) -> list[str]:
    names = list(rows[0])
    lines = [
        "| " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|" + "---|" * len(names),
    ]
    for row in rows:
        cells = [
            f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in names
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    main()
