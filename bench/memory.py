"""Measures the memory of each process of a server, and the CPU time of its start: ``python -m
bench.memory --model-path FILE``.

The proportional set size (PSS) counts a page that N processes share as 1/N in each, other programs
that have loaded the same libraries included: run it alone, or compare the column *anonymous*.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from bench.local_server import local_server
from bench.markdown import markdown

IDLE_S = 6.0
"""Until what a server loads ahead is there."""
_LONG = "The quick brown fox jumps over the lazy dog. " * 120
REQUESTS = {
    "at the first answer": {"prompt": "Hello", "max_tokens": 1},
    "idle": None,
    "after a prompt of 1,200 tokens": {"prompt": _LONG, "max_tokens": 32},
    "after an answer in JSON": {"prompt": "A city as JSON: ", "max_tokens": 64, "response_format": {"type": "json_object"}},
    "after a choice": {"prompt": "Yes or no? ", "max_tokens": 4, "guided_choice": ["yes", "no"]},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    arguments, flags = parser.parse_known_args()
    with local_server(arguments.model_path, *flags) as url:
        supervisor = next(
            process
            for process in psutil.Process().children(recursive=True)
            if "radixrt.cli" in process.cmdline()
        )
        for title, body in REQUESTS.items():
            if body is None:
                time.sleep(IDLE_S)
            else:
                httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
            print(f"\n{title}\n", *markdown(_rows(supervisor)), sep="\n", flush=True)


def _rows(supervisor: psutil.Process) -> list[dict[str, object]]:
    """Megabytes of each kind of process, and of all."""
    memory: dict[str, Counter[str]] = {}
    for process in [supervisor, *supervisor.children(recursive=True)]:
        words = process.cmdline()
        module = words[words.index("-m") + 1].removeprefix("radixrt.") if "-m" in words else "?"
        kind = {"cli": "supervisor", "constrained": "compilers"}.get(module, module)
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in rollup)}
        part = memory.setdefault(kind, Counter())
        part["PSS"] += sizes["Pss"]
        part["anonymous"] += sizes["Pss_Anon"]
        part["CPU s"] += round(100 * sum(process.cpu_times()[:2]))
    memory["all"] = sum(memory.values(), Counter())
    return [
        {
            "process": kind,
            "PSS, MB": f"{part['PSS'] * 1024 / 1e6:,.0f}",
            "anonymous, MB": f"{part['anonymous'] * 1024 / 1e6:,.0f}",
            "CPU time, s": f"{part['CPU s'] / 100:.2f}",
        }
        for kind, part in memory.items()
    ]


if __name__ == "__main__":
    main()
