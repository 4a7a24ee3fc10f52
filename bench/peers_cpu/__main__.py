"""``python -m bench.peers_cpu [--engines radixrt ...] [--workloads a b c d e f] [--rounds 3]``

Engines take turns: in each round every engine is started, warmed up, measured on each workload, and stopped, so a machine that slows
down slows all of them down. The table has the medians over the rounds. Only a machine that does nothing else gives numbers worth quoting.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.peers_cpu.checkpoint import make_checkpoint
from bench.peers_cpu.engines import ENGINES, Engine, serving
from bench.peers_cpu.measuring import run
from bench.peers_cpu.workloads import Workload, make_workloads
from radixrt.bench.report import Summary
from radixrt.models.checkpoint import resolve_model_path

Results = dict[tuple[str, str], list[Summary]]
"""By workload and engine; one a round."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    workloads = make_workloads()
    parser.add_argument("--engines", nargs="+", default=["radixrt"], choices=ENGINES)
    parser.add_argument("--workloads", nargs="+", default=list(workloads), choices=workloads)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "radixrt-peers-checkpoint",
        help="made if it is not there: 0.77 GB",
    )
    parser.add_argument("--json", type=Path, help="write all summaries there")
    arguments = parser.parse_args()
    checkpoint = make_checkpoint(arguments.checkpoint)
    results: Results = {}
    for number in range(arguments.rounds):
        for name in arguments.engines:
            chosen = [workloads[letter] for letter in arguments.workloads]
            _measure(
                ENGINES[name], [w for w in chosen if not w.built_in_model], checkpoint, results
            )
            built_in = [w for w in chosen if w.built_in_model]
            _measure(ENGINES[name], built_in, resolve_model_path("demo"), results)
        print(f"round {number + 1} of {arguments.rounds} done", flush=True)
    print(_table(workloads, arguments.engines, results))
    if arguments.json:
        document = {f"{w} {e}": [s.as_json() for s in runs] for (w, e), runs in results.items()}
        arguments.json.write_text(json.dumps(document, indent=1))


def _measure(engine: Engine, workloads: list[Workload], model: Path, results: Results) -> None:
    if not workloads:
        return
    log = Path(tempfile.gettempdir()) / f"radixrt-peers-{engine.name}.log"
    with serving(engine, model, log) as url:
        for workload in workloads:
            asyncio.run(run(url, engine.model_name, _warmup(workload)))
            summary = asyncio.run(run(url, engine.model_name, workload))
            if summary.failed:
                print(f"{engine.name}, ({workload.name}): {summary.errors}", flush=True)
            results.setdefault((workload.name, engine.name), []).append(summary)


def _warmup(workload: Workload) -> Workload:
    """One conversation of the same form that shares no text with the others."""
    first = workload.conversations[0]
    turns = [replace(turn, question=f"warm up {turn.question}") for turn in first.turns[:2]]
    context = f"warm up {first.context}" if first.context else ""
    return replace(workload, conversations=[replace(first, context=context, turns=turns)] * 1)


def _table(workloads: dict[str, Workload], engines: list[str], results: Results) -> str:
    lines = [
        "| workload | engine | output tokens/s | TTFT p50, ms | ITL p50, ms | cached tokens | failed |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for letter, workload in workloads.items():
        for name in engines:
            if runs := results.get((letter, name)):
                lines.append(f"| ({letter}) {workload.what} | {name} | {_medians(runs)} |")
    return "\n".join(lines)


def _medians(runs: list[Summary]) -> str:
    speeds = [run.output_tokens_per_s for run in runs]
    first = statistics.median(run.ttft_ms.p50 for run in runs if run.ttft_ms)
    between = statistics.median(run.itl_ms.p50 for run in runs if run.itl_ms)
    cached = statistics.median(run.cached_tokens for run in runs)
    return (
        f"{statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f}) | {first:.0f} | {between:.1f} | "
        f"{cached:.0f} | {sum(run.failed for run in runs)}"
    )


if __name__ == "__main__":
    main()
