"""Part 6: where a decode step's time goes, on the device from a profiler's trace and on the host from clocks.

The scheduler runs in the worker's thread here, where in a server it has a process of its own, so what a
server leaves idle is no more than what this says.
"""

import gzip
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
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


@dataclass(frozen=True)
class Busy:
    """What a device did between two moments; microseconds."""

    span: float
    busy: float
    by_kind: dict[str, float]

    @property
    def idle_share(self) -> float:
        return 1 - self.busy / self.span if self.span else 0.0


def busy_time(events: Iterable[dict[str, Any]]) -> Busy:
    """From the events of a trace in Chrome's format. Kernels that overlap count once."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ON_DEVICE
    )
    if not spans:
        return Busy(0.0, 0.0, {})
    busy, reached = 0.0, spans[0][0]
    kinds: Counter[str] = Counter()
    for start, end, name in spans:
        new = max(0.0, end - max(start, reached))
        busy += new
        kinds[kind_of(name)] += new
        reached = max(reached, end)
    return Busy(reached - spans[0][0], busy, dict(kinds))


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
    """Measure decode steps of several batch sizes."""
    engine = InProcess(model_dir, device, settings)
    for batch in sizes.anatomy_batches:
        engine.begin(shape, batch, sizes.anatomy_context, 3 * sizes.anatomy_steps + 20)
        engine.advance(5)
        device_times = _profiled(engine, sizes.anatomy_steps, results.folder, batch)
        engine.times = HostTimes()
        begin, end = _marks(device)
        begin()
        engine.advance(sizes.anatomy_steps)
        step_ms = end() * 1e3 / sizes.anatomy_steps
        results.add(_result(shape, ceilings, sizes, batch, step_ms, engine.times, device_times))
        engine.finish()


def _marks(device: torch.device) -> tuple[Any, Any]:
    """Begin and end of a measured stretch; the end returns seconds, on the device's clock where it has one."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def end() -> float:
            last.record()
            last.synchronize()
            return first.elapsed_time(last) / 1e3

        return first.record, end
    import time

    started: list[float] = []
    return (
        lambda: started.append(time.perf_counter()),
        lambda: time.perf_counter() - started[0],
    )


def _profiled(engine: InProcess, steps: int, folder: Path, batch: int) -> Busy:
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
    (folder / f"decode-batch-{batch}.trace.json.gz").write_bytes(gzip.compress(text.encode()))
    return busy_time(json.loads(text)["traceEvents"])


def _result(
    shape: ModelShape,
    ceilings: Ceilings,
    sizes: Sizes,
    batch: int,
    step_ms: float,
    host: HostTimes,
    device: Busy,
) -> Result:
    context = batch * (sizes.anatomy_context + 1.5 * sizes.anatomy_steps)
    bound_s, _, _ = step_seconds(
        shape, ceilings, tokens=batch, rows=batch, context=context, attended=context
    )
    figures = {"step ms": step_ms}
    if device.span:
        figures["idle share"] = device.idle_share
        for kind, busy in sorted(device.by_kind.items()):
            figures[f"{kind} ms"] = busy / 1e3 / sizes.anatomy_steps
    for name, seconds in (("plan", host.plan), ("launch", host.launch), ("absorb", host.absorb)):
        figures[f"host {name} ms"] = median(seconds) * 1e3
    return Result(6, f"{shape.name}, batch {batch}", figures, {"step ms": bound_s * 1e3})
