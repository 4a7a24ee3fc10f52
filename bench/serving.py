"""Measures a server with a 387 M model as its clients see it: ``python -m bench.serving [--rounds 3] [--quick]``.

The workloads of ``radixrt bench serve``, each on an empty cache; medians and ranges over the rounds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import children
from bench.dummy_checkpoint import write_dummy_checkpoint
from bench.local_server import local_server
from bench.markdown import markdown, median_and_range

RADIXRT = [sys.executable, "-m", "radixrt.cli"]
WORKLOADS = {
    "shared-prefix": "--groups 4 --prefix-len 512 --input-len 32 --output-len 32",
    "random": "--input-len 256 --output-len 32",
    "multi-turn": "--turns 4 --input-len 48 --output-len 32 --prefix-len 64",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model and few requests")
    arguments = parser.parse_args()
    count = 8 if arguments.quick else 32
    summaries: dict[str, list[dict[str, Any]]] = {name: [] for name in WORKLOADS}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        if arguments.quick:
            write_dummy_checkpoint(model, hidden_size=128, num_layers=2)
        else:
            write_dummy_checkpoint(model)
        with local_server(str(model), "--load-format", "dummy", "--log-level", "warning") as url:
            for _ in range(arguments.rounds):
                for workload, seen in summaries.items():
                    seen.append(_measure(url, workload, count))
    print("\n".join(markdown([_row(name, seen) for name, seen in summaries.items()])))


def _measure(url: str, workload: str, count: int) -> dict[str, Any]:
    output = children.run(
        [
            *RADIXRT, "bench", "serve", "--base-url", f"{url}/v1", "--workload", workload,
            *WORKLOADS[workload].split(), "--num-prompts", str(count), "--flush-cache", "--json", "-",
        ],
        check=True, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    summary: dict[str, Any] = json.loads(output)["summary"]
    return summary


def _row(workload: str, seen: list[dict[str, Any]]) -> dict[str, Any]:
    def spread(*path: str) -> str:
        values: list[Any] = seen
        for key in path:
            values = [value[key] for value in values]
        return median_and_range(values)

    return {
        "workload": workload,
        "output tokens/s": spread("output_tokens_per_s"),
        "TTFT p50, ms": spread("ttft_ms", "p50"),
        "TTFT p99, ms": spread("ttft_ms", "p99"),
        "ITL p50, ms": spread("itl_ms", "p50"),
        "ITL p99, ms": spread("itl_ms", "p99"),
        "prompt tokens": seen[0]["prompt_tokens"],
        "of them cached": seen[0]["cached_tokens"],
    }


if __name__ == "__main__":
    main()
