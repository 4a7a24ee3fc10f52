"""Part 6: where a decode step's time goes, by a profiler's trace and by the host's clocks.

The scheduler runs in the worker's thread here, where in a server it has a process of its own, so
what a server leaves idle is no more than what this says.
"""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.ceilings import Ceilings
from bench.gpu.in_process import HostTimes, InProcess
from bench.gpu.results import Result, Results
from bench.gpu.roofline import step_seconds
from bench.gpu.shapes import ModelShape
from bench.gpu.workloads import Sizes

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of a trace's events that keep the device busy."""

KINDS = {
    "attention": ("batchprefill", "batchdecode", "prefillwith", "attention", "merge", "cascade"),
    "sampling": ("_draw_kernel", "_penalise_kernel", "sampl", "argmax"),
    "matrix products": ("gemm", "gemv", "nvjet", "xmma", "cutlass", "cublas", "matmul"),
    "norms, rotation, activation, append": ("norm", "rotary", "rotate", "rope", "act_and_mul", "activation", "append"),
}  # fmt: skip
"""What a kernel does, by parts of its name in small letters; the first that fits."""


LAUNCH_GAP_US = 5.0
"""A shorter gap lies between two kernels of a queue that is not empty: the device needs about a
microsecond from one to the next. In a longer one it waits for the host."""

WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Busy:
    """What a device did between two moments; microseconds."""

    span: float
    busy: float
    by_kind: dict[str, float]
    launch_gaps: float = 0.0
    """Idle in gaps of up to :data:`LAUNCH_GAP_US`."""
    long_gaps: int = 0
    """Gaps over that."""

    @property
    def launch_gap_share(self) -> float:
        return self.launch_gaps / self.span if self.span else 0.0

    @property
    def long_gap_share(self) -> float:
        return (self.span - self.busy - self.launch_gaps) / self.span if self.span else 0.0


def busy_time(events: Iterable[dict[str, Any]]) -> Busy:
    """Read a device's time from a trace in Chrome's format. Kernels that overlap count once."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE
    )
    if not spans:
        return Busy(0.0, 0.0, {})
    busy, reached, launch_gaps, long_gaps = 0.0, spans[0][0], 0.0, 0
    kinds: Counter[str] = Counter()
    for start, end, name in spans:
        gap = max(0.0, start - reached)
        if gap > LAUNCH_GAP_US:
            long_gaps += 1
        else:
            launch_gaps += gap
        new = max(0.0, end - max(start, reached))
        busy += new
        kinds[kind_of(name)] += new
        reached = max(reached, end)
    return Busy(reached - spans[0][0], busy, dict(kinds), launch_gaps, long_gaps)


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "other"


def anatomy(
    model_dir: Path,
    shape: ModelShape,
    device: torch.device,
    settings: dict[str, object],
    ceilings: Ceilings,
    sizes: Sizes,
    results: Results,
) -> None:
    """Measure decode steps of several batch sizes.

    Raises:
        RuntimeError: not all sequences were decoding all the time.
    """
    engine = InProcess(model_dir, device, settings)
    steps = sizes.anatomy_steps
    for batch, context in sizes.anatomy:
        # Half of what is measured comes after the middle, and a warm-up and the profiled steps
        # before it.
        prompt = max(1, context - WARM_UP_STEPS - steps - steps // 2)
        engine.begin(shape, batch, prompt, 3 * steps + 20)
        engine.advance(WARM_UP_STEPS)
        device_times = _profiled(engine, steps, results.folder, f"{batch}x{context}")
        engine.times = HostTimes()
        before = engine.context()
        begin, end = _marks(device)
        begin()
        engine.advance(steps)
        step_ms = end() * 1e3 / steps
        if engine.num_decoding() != batch:
            raise RuntimeError(f"{engine.num_decoding()} of {batch} sequences decode at the end")
        measured = Steps(batch, (before + engine.context()) / 2, step_ms)
        results.add(_result(shape, ceilings, measured, steps, engine.times, device_times))
        engine.finish()


@dataclass(frozen=True)
class Steps:
    """Decode steps that were measured."""

    batch: int
    context: float
    """Tokens of KV that a step reads, of all sequences."""
    step_ms: float


def _marks(device: torch.device) -> tuple[Any, Any]:
    """Begin and end of a measured stretch; the end returns seconds, on the device's clock where it
    has one."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def end() -> float:
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        return first.record, end
    started: list[float] = []
    return lambda: started.append(perf_counter()), lambda: perf_counter() - started[0]


def _profiled(engine: InProcess, steps: int, folder: Path, case: str) -> Busy:
    if engine.device.type != "cuda":
        engine.advance(steps)
        return Busy(0.0, 0.0, {})
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        engine.advance(steps)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        trace = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        text = trace.read_text()
    (folder / f"decode-{case}.trace.json.gz").write_bytes(gzip.compress(text.encode()))
    return busy_time(json.loads(text)["traceEvents"])


def _result(
    shape: ModelShape,
    ceilings: Ceilings,
    measured: Steps,
    profiled_steps: int,
    host: HostTimes,
    device: Busy,
) -> Result:
    batch, context = measured.batch, measured.context
    bound_s, _, _ = step_seconds(
        shape, ceilings, tokens=batch, rows=batch, context=context, attended=context
    )
    figures = {"output tokens/s": batch / measured.step_ms * 1e3, "step ms": measured.step_ms}
    if device.span:
        figures["idle in launch gaps"] = device.launch_gap_share
        figures["idle in gaps over 5 µs"] = device.long_gap_share
        figures["gaps over 5 µs a step"] = device.long_gaps / profiled_steps
        for kind, busy in sorted(device.by_kind.items()):
            figures[f"{kind} ms"] = busy / 1e3 / profiled_steps
    for name, seconds in (("plan", host.plan), ("launch", host.launch), ("absorb", host.absorb)):
        figures[f"host {name} ms"] = median(seconds) * 1e3
    case = f"{shape.name}, {batch} sequences of {context / batch:.0f} tokens"
    bound = {"output tokens/s": batch / bound_s, "step ms": bound_s * 1e3}
    return Result(6, case, figures, bound)
