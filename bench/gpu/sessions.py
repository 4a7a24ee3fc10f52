"""Runs the parts in sessions: parts that share an engine, in a process with a time limit.

A part that hangs or fails takes its session with it and no other; what it has measured is written
by then.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import children
from bench.gpu.anatomy import anatomy
from bench.gpu.ceilings import Ceilings
from bench.gpu.parts import PARTS, Bench, warm_up
from bench.gpu.results import Result, Results
from bench.gpu.shapes import LLAMA_31_8B, QWEN3_06B, QWEN3_14B, ModelShape
from bench.gpu.workloads import DRY, Sizes
from radixrt.offline.llm import LLM

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Session:
    """One engine, or none, and what is measured with it."""

    name: str
    parts: tuple[int, ...]
    limit_s: float
    shape: ModelShape = LLAMA_31_8B
    settings: dict[str, object] = field(default_factory=dict)
    case: str = ""


SESSIONS = (
    Session("ceilings", (0,), 40),
    Session("llama", (1, 2, 3, 4, 5), 150),
    Session("anatomy", (6,), 150),
    Session("no-cascade", (3,), 60, settings={"debug_disable_cascade": True}),
    Session("qwen3-0.6b", (2,), 60, shape=QWEN3_06B),
    Session("qwen3-14b", (2,), 75, shape=QWEN3_14B),
    Session("kernels", (7,), 60),
)
"""Sessions, that which is worth knowing first at the beginning."""

ENGINE = {"context_length": 16384, "max_running_requests": 512, "cuda_graph_max_batch_size": 512}
DRY_ENGINE = {"context_length": 2048, "max_running_requests": 8, "max_total_tokens": 4096}


@dataclass(frozen=True)
class Options:
    """What a run was asked for."""

    folder: Path
    only: tuple[int, ...]
    dry_run: bool
    budget_s: float
    settings: dict[str, object]

    @property
    def sizes(self) -> Sizes:
        return DRY if self.dry_run else Sizes()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry_run else "cuda")

    def parts_of(self, session: Session) -> tuple[int, ...]:
        return tuple(part for part in session.parts if not self.only or part in self.only)


def run_all(options: Options, arguments: Sequence[str]) -> int:
    """Run every session that has something to do, until the budget is spent.

    Args:
        arguments: of this command, which each session's process gets too.

    Returns:
        how many sessions failed or found no time
    """
    results, failed = Results(options.folder), 0
    deadline = time.monotonic() + options.budget_s
    for session in SESSIONS:
        if session.name != "ceilings" and not options.parts_of(session):
            continue
        left = deadline - time.monotonic()
        if left < session.limit_s / 3:
            print(
                f"{session.name}: left out, {max(0, left):.0f} s of the budget are left", flush=True
            )
            failed += 1
            continue
        print(f"{session.name}: at most {min(left, session.limit_s):.0f} s", flush=True)
        begin = time.monotonic()
        status = _run_alone(session, arguments, min(left, session.limit_s))
        failed += status != 0
        verdict = "done" if status == 0 else f"ended with status {status}"
        print(f"{session.name}: {verdict} after {time.monotonic() - begin:.0f} s", flush=True)
        results.write_report()
    return failed


def _run_alone(session: Session, arguments: Sequence[str], limit_s: float) -> int:
    """Run the session in a process group of its own, which is ended when its time is over."""
    command = [sys.executable, "-m", "bench.gpu", *arguments, "--session", session.name]
    # radixrt need not be installed: the engine's processes find it here.
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    process = children.start(command, env=environment)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return children.end(process, timeout_s=10) or 1
    finally:
        children.end(process, timeout_s=0)


def run_session(name: str, options: Options) -> None:
    """Measure, in the session's own process, everything that it has to."""
    session = next(session for session in SESSIONS if session.name == name)
    results = Results(options.folder)
    if session.name == "ceilings":
        _measure_ceilings(options, results)
        return
    if session.name == "kernels":
        from bench.gpu.kernels import measure_kernels

        measure_kernels(options.device, _ceilings(results), results)
        return
    shape = session.shape.tiny() if options.dry_run else session.shape
    settings = {
        **(DRY_ENGINE if options.dry_run else ENGINE),
        **options.settings,
        **session.settings,
    }
    with tempfile.TemporaryDirectory() as folder:
        model_dir = shape.write_checkpoint(Path(folder))
        if session.name == "anatomy":
            sizes = options.sizes
            anatomy(model_dir, shape, options.device, settings, _ceilings(results), sizes, results)
            return
        begin = time.perf_counter()
        with LLM(
            str(model_dir), load_format="dummy", device=options.device.type, **settings
        ) as llm:
            started = {
                "seconds to start": time.perf_counter() - begin,
                "KV pool tokens": llm.info.kv_pool_tokens,
            }
            results.add(Result(0, f"engine, {shape.name}{session.case}", started))
            bench = Bench(llm, shape, _ceilings(results), options.sizes, results, session.case)
            warm_up(bench)
            for part in options.parts_of(session):
                PARTS[part](bench)


def _measure_ceilings(options: Options, results: Results) -> None:
    ceilings = Ceilings.measure(options.device, small=options.dry_run)
    name = "CPU" if options.dry_run else torch.cuda.get_device_name()
    results.add(Result(0, f"{name}, torch {torch.__version__}", ceilings.as_figures()))


def _ceilings(results: Results) -> Ceilings:
    for result in results.read():
        if "read_bytes_per_s" in result.figures:
            return Ceilings(**result.figures)
    raise RuntimeError("the session 'ceilings' has to run first")
