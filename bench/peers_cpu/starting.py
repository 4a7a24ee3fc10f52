"""``python -m bench.peers_cpu start``: the time from an engine's command to its first answer.

    python -m bench.peers_cpu start --checkpoint gemma --engines radixrt-q4_k_m llama.cpp-q4_k_m

Engines take turns. The files are in the system's cache from the second round on; the first round
counts apart.
"""

import argparse
import tempfile
import time
from pathlib import Path

import httpx

from bench.markdown import markdown, median_and_range
from bench.peers_cpu.checkpoints import Checkpoint
from bench.peers_cpu.converting import converted
from bench.peers_cpu.engines import Engine
from bench.peers_cpu.serving import serving


def measure_starts(
    parsed: argparse.Namespace, engines: list[Engine], checkpoint: Checkpoint
) -> None:
    """Print the table; ``parsed`` has rounds and peers_dir."""
    models = {engine.name: converted(engine, checkpoint, parsed.peers_dir) for engine in engines}
    seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for _ in range(parsed.rounds + 1):
        for engine in engines:
            spent = _start(engine, checkpoint, models[engine.name], parsed.peers_dir)
            seconds[engine.name].append(spent)
    rows = [
        {"engine": name, "first round, s": f"{each[0]:.2f}", "s": median_and_range(each[1:], 2)}
        for name, each in seconds.items()
    ]
    print("\n".join(markdown(rows)))


def _start(engine: Engine, checkpoint: Checkpoint, model: Path, peers: Path) -> float:
    log = Path(tempfile.gettempdir()) / f"radixrt-peers-{engine.name}-start.log"
    body = {"model": "model", "prompt": "Hello", "max_tokens": 1}
    begin = time.perf_counter()
    with serving(engine, checkpoint.folder, model, peers, log) as url:
        httpx.post(f"{url}/completions", json=body, timeout=600).raise_for_status()
        return time.perf_counter() - begin
