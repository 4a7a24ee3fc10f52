"""``python -m bench.peers_cpu drafts``: tokens per second with drafts and without, for each kind of weights and instruction set.

    python -m bench.peers_cpu drafts --checkpoint gemma --rounds 3
    python -m bench.peers_cpu drafts --checkpoint gemma --weights q4_k_m --isas avx2 --workloads c

In each round two new servers are started, one of them with ``--speculation off``. They are measured in turns on shortened workloads, the short ones
several times under a new cache salt, so that a measurement takes some ten seconds. Only one of the two has requests at a time.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.peers_cpu.checkpoints import Checkpoint
from bench.peers_cpu.converting import converted
from bench.peers_cpu.engines import ENGINES, KV_TOKENS, NO_DRAFTS, Engine
from bench.peers_cpu.measuring import Run, measure
from bench.peers_cpu.serving import EngineFailedError, serving
from bench.peers_cpu.tasks import Workload
from bench.peers_cpu.workloads import make_workloads

WEIGHTS = {"bfloat16": "radixrt", "int8": "radixrt-int8", "q4_k_m": "radixrt-q4_k_m"}
"""The engines that serve them."""
ISAS = {
    "avx2": {
        "RADIXRT_KERNELS_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "default": {},
}
"""The variables that choose them."""
WORKLOADS = "abcde"
MAX_CONVERSATIONS = 16
MIN_SECONDS, MAX_TIMES = 6.0, 4
"""A workload is measured again until it has taken so long, and at most so often."""
DRAFTS = ("off", "on")

Cell = tuple[str, str, str]
"""Instruction set, weights, workload."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--isas", nargs="+", default=list(ISAS), choices=ISAS)


@dataclass
class Measured:
    """All runs of one cell, without drafts or with them."""

    rates: list[float] = field(default_factory=list)
    """Output tokens per second, one a round."""
    runs: list[Run] = field(default_factory=list)

    def add(self, runs: list[Run]) -> None:
        """Those of a round."""
        self.runs += runs
        seconds = sum(run.summary.duration_s for run in runs)
        self.rates.append(sum(run.summary.output_tokens for run in runs) / seconds)


def compare_drafts(parsed: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Print a line for each cell; ``parsed`` has also workloads, rounds, checkpoint, json and peers_dir."""
    made = make_workloads(parsed.checkpoint, quick=parsed.quick)
    workloads = [_shortened(made[letter]) for letter in WORKLOADS if letter in parsed.workloads]
    cells: dict[Cell, dict[str, Measured]] = {}
    for number in range(parsed.rounds):
        turns = DRAFTS if number % 2 else DRAFTS[::-1]
        for isa, weights in itertools.product(parsed.isas, parsed.weights):
            engine = ENGINES[WEIGHTS[weights]]
            engine = replace(engine, variables={**engine.variables, **ISAS[isa]})
            with _two_servers(engine, checkpoint, parsed.peers_dir) as urls:
                for workload in workloads:
                    cell = isa, weights, workload.name
                    measured = cells.setdefault(cell, {drafts: Measured() for drafts in DRAFTS})
                    runs = _measure(urls, engine, workload, turns)
                    for drafts in DRAFTS:
                        measured[drafts].add(runs[drafts])
                    print(f"round {number + 1}: {_line(cell, measured)}", flush=True)
    print("\nMedians of all rounds:")
    for cell, measured in cells.items():
        print(_line(cell, measured))
    if parsed.json:
        rows = {" ".join(cell): _as_json(measured) for cell, measured in cells.items()}
        parsed.json.write_text(json.dumps(rows, indent=1))


def _shortened(workload: Workload) -> Workload:
    count = len(workload.conversations)
    return replace(
        workload, conversations=workload.conversations[:: -(-count // MAX_CONVERSATIONS)]
    )


@contextlib.contextmanager
def _two_servers(engine: Engine, checkpoint: Checkpoint, peers: Path) -> Iterator[dict[str, str]]:
    """The addresses of a server without drafts and of one with them."""
    model = converted(engine, checkpoint, peers)
    flags = {"on": (), "off": NO_DRAFTS}
    with contextlib.ExitStack() as stack:
        urls = {}
        for drafts in DRAFTS:
            memory = ("--max-total-tokens", str(KV_TOKENS))
            one = replace(engine, command=(*engine.command, *memory, *flags[drafts]))
            log = Path(tempfile.gettempdir()) / f"radixrt-drafts-{drafts}.log"
            served = serving(one, checkpoint.folder, model, peers, log)
            urls[drafts] = stack.enter_context(served)
        yield urls


def _measure(
    urls: dict[str, str], engine: Engine, workload: Workload, turns: tuple[str, ...]
) -> dict[str, list[Run]]:
    """The runs of one workload in one round."""
    runs: dict[str, list[Run]] = {drafts: [] for drafts in DRAFTS}
    for number in range(MAX_TIMES):
        for drafts in turns:
            run = asyncio.run(measure(urls[drafts], engine, workload, salt=f"{number}"))
            if run.summary.failed:
                raise EngineFailedError(f"{run.summary.failed} failed: {run.summary.errors}")
            runs[drafts].append(run)
        if sum(run.summary.duration_s for run in runs["off"]) >= MIN_SECONDS:
            break
    return runs


def _line(cell: Cell, measured: dict[str, Measured]) -> str:
    off, on = (statistics.median(measured[drafts].rates) for drafts in DRAFTS)
    each = "; ".join(
        f"{drafts} {' '.join(f'{rate:.1f}' for rate in measured[drafts].rates)}"
        for drafts in DRAFTS
    )
    isa, weights, letter = cell
    return f"{isa} {weights} ({letter}): on ÷ off {on / off:.3f} ({each} tokens/s)"


def _as_json(measured: dict[str, Measured]) -> dict[str, list[object]]:
    return {drafts: [asdict(run) for run in each.runs] for drafts, each in measured.items()}
