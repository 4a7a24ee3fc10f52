"""``python -m bench.gpu.host``: the host's time for steps on a GPU, on a machine without one.

    python -m bench.gpu.host                      a mixed step of 256 decodes and one chunk of 512
    tokens python -m bench.gpu.host --chunk 64 2048      other chunks python -m bench.gpu.host
    --launch-us 2        each launch costs 2 µs, as a driver would take

The worker runs as it does on a GPU: torch's CUDA build, FlashInfer's compiled modules with their
planners, Triton's launchers. ``stub_driver.c`` stands in for the CUDA runtime, the driver and
cuBLAS: its launches do nothing and are counted.

Included: Python, torch's dispatch and allocator, FlashInfer's planning and argument checks,
Triton's launchers. Not included: what the driver does for a launch (some 2 µs; --launch-us adds
it), cuBLAS's choice of a kernel, waits for the device, copies of more than a megabyte. Times are
CPU time of the launching thread, the best of all rounds and the median, so what else the machine
does counts little, but it does count: caches are shared.

Needs torch's CUDA build, flashinfer-python with compiled modules in it (``python -m
tools.flashinfer_kernels install``), a C compiler and CUDA's headers (with NVIDIA's wheels:
nvidia-cuda-crt beside those that torch brings).
"""

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu.shapes import LLAMA_31_8B, QWEN3_06B, QWEN3_14B
from radixrt.base.config import ServerConfig
from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import make_device
from radixrt.layers.parallel import TensorParallel
from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import Admit, Prefill, StepPlan
from radixrt.worker.build import build_runner
from radixrt.worker.runner import ModelRunner

SHAPES = {shape.name: shape for shape in (LLAMA_31_8B, QWEN3_06B, QWEN3_14B)}
PRELOADED = "RADIXRT_STUB_DRIVER"
COUNTED = ("kernels", "products", "copies", "fills", "graphs")
"""As ``stub_driver.c`` numbers them."""

CONTEXT, PAGE_SIZE = 512, 16
SAMPLING = SamplingParams(temperature=1.0, max_tokens=10_000, ignore_eos=True, seed=0)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default=LLAMA_31_8B.name, choices=SHAPES)
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode")
    parser.add_argument("--chunk", type=int, nargs="+", default=[512], help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=300, help="steps of each kind")
    parser.add_argument("--launch-us", type=float, default=0.0, help="what each launch takes")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine"
    )
    parsed = parser.parse_args(arguments)
    if PRELOADED not in os.environ:
        _run_again_with_stub(arguments, parsed.launch_us)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = SHAPES[parsed.shape].write_checkpoint(Path(folder))
        steps = Steps(model_dir, parsed.rows, max(parsed.chunk), _settings(parsed.set))
        print(
            f"{parsed.shape}, {parsed.rows} sequences of {CONTEXT} tokens; CPU time of the thread, ms: best (median)"
        )
        steps.measure("decode, in a graph", lambda: StepPlan(step_id=0), parsed.rounds)
        for chunk in parsed.chunk:
            name = f"mixed, with a chunk of {chunk} tokens"
            steps.measure(name, partial(steps.mixed, chunk), parsed.rounds)


def _settings(texts: list[str]) -> dict[str, Any]:
    from bench.gpu.__main__ import _setting

    return dict(_setting(text) for text in texts)


# ---------------------------------------------------------------- the stub


def _run_again_with_stub(arguments: list[str], launch_us: float) -> None:
    """Compile the stub and replace this process by one that has it in the place of NVIDIA's
    libraries."""
    folder = Path(tempfile.mkdtemp(prefix="radixrt-stub-"))
    library = compile_stub(folder)
    environment = {
        **os.environ,
        PRELOADED: str(library),
        "LD_PRELOAD": str(library),
        "TRITON_LIBCUDA_PATH": str(folder),
        "RADIXRT_STUB_LAUNCH_NS": str(int(launch_us * 1000)),
        "FLASHINFER_DISABLE_JIT": "1",
        "FLASHINFER_USE_CUDA_NORM": "1",
    }
    os.execve(sys.executable, [sys.executable, "-m", "bench.gpu.host", *arguments], environment)


def compile_stub(folder: Path) -> Path:
    """The stub as a library in ``folder``, under the name of NVIDIA's."""
    library = folder / "libcuda.so.1"
    headers = [f"-I{path}" for path in cuda_headers()]
    command = ["cc", "-O2", "-w", "-std=gnu11", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    source = Path(__file__).with_name("stub_driver.c")
    subprocess.run([*command, *headers, "-o", str(library), str(source)], check=True)
    return library


def cuda_headers() -> Iterator[Path]:
    """Folders of CUDA's headers: of NVIDIA's wheels, and of a toolkit."""
    for folder in (Path(path) / "nvidia" for path in sys.path):
        yield from folder.glob("cu*/include")
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
    if toolkit.exists():
        yield toolkit


# ---------------------------------------------------------------- steps


@dataclass
class Times:
    """Milliseconds of CPU time, a step each."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, part: str, milliseconds: float) -> None:
        self.parts.setdefault(part, []).append(milliseconds)

    def __str__(self) -> str:
        return ", ".join(
            f"{part} {min(times):.2f} ({median(times):.2f})" for part, times in self.parts.items()
        )


class Steps:
    """A worker whose batch decodes, and to which chunks of prompts are added."""

    def __init__(
        self, model_dir: Path, rows: int, longest_chunk: int, settings: dict[str, Any]
    ) -> None:
        pages = -(-2 * CONTEXT // PAGE_SIZE)
        self._first_page = rows * pages
        self._rows = rows
        config = ServerConfig(
            **{
                "model_path": str(model_dir),
                "load_format": "dummy",
                "device": "cuda",
                "attention_backend": "flashinfer",
                "page_size": PAGE_SIZE,
                "context_length": 2 * max(CONTEXT, longest_chunk),
                "max_running_requests": rows + 1,
                "cuda_graph_max_batch_size": rows,
                "max_total_tokens": (self._first_page + longest_chunk) * PAGE_SIZE,
                **settings,
            }
        )
        device = make_device(torch.device("cuda"))
        tokenizer = model_dir / "tokenizer.json"
        self._runner, _ = build_runner(config, device, TensorParallel(), tokenizer, lambda _: None)
        self._admitted = False
        prompt = pack_ids(np.zeros(CONTEXT, dtype=np.int32))
        admit, prefill = [], []
        for slot in range(rows):
            own = pack_ids(range(slot * pages, (slot + 1) * pages))
            admit.append(Admit(slot, prompt, CONTEXT - 1, own, SAMPLING, 0))
            prefill.append(Prefill(slot, CONTEXT - 1, 1))
        self._runner.step(StepPlan(step_id=0, admit=admit, prefill=prefill))

    def mixed(self, chunk: int) -> StepPlan:
        """A plan by which all sequences decode, and the whole prompt of a new one is computed."""
        slot, count = self._rows, -(-(chunk + 1) // PAGE_SIZE)
        pages = pack_ids(range(self._first_page, self._first_page + count))
        prompt = pack_ids(np.zeros(chunk, dtype=np.int32))
        release, self._admitted = [slot] if self._admitted else [], True
        return StepPlan(
            step_id=0,
            release=release,
            admit=[Admit(slot, prompt, 0, pages, SAMPLING, 0)],
            prefill=[Prefill(slot, 0, chunk)],
        )

    def measure(self, name: str, plan: Callable[[], StepPlan], rounds: int) -> None:
        """Print what the parts of such a step take, and how many launches it has."""
        stub, times = ctypes.CDLL(os.environ[PRELOADED]), Times()
        for _ in range(5):
            self._runner.step(plan())
        for _ in range(rounds):
            self._rewind()
            step_plan = plan()
            stub.radixrt_stub_reset()
            with _watched(self._runner, times) as parts:
                begin = time.thread_time()
                self._runner.step(step_plan)
                step_ms = 1e3 * (time.thread_time() - begin)
            times.add("plan and launch", sum(parts.values()))
            times.add("whole step", step_ms)
        counts = {kind: stub.radixrt_stub_count(index) for index, kind in enumerate(COUNTED)}
        counts = {kind: count for kind, count in counts.items() if count}
        print(f"{name}: {times}")
        print(f"    {', '.join(f'{count} {kind}' for kind, count in counts.items())}", flush=True)

    def _rewind(self) -> None:
        """Back to the same context for each step."""
        self._runner._batch.computed[: self._rows] = CONTEXT


@contextmanager
def _watched(runner: ModelRunner, times: Times) -> Iterator[dict[str, float]]:
    """Add up what the parts of a step take: what the plan changes, the inputs and their upload, and
    the attention's plan with the launches up to the logits."""
    parts: dict[str, float] = {}
    changed = [(runner, "_apply", "apply"), (runner._batch, "next_step", "inputs"), (runner, "_forward", "attention plan and launch")]  # fmt: skip

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begin = time.thread_time()
            result = function(*arguments)
            parts[part] = 1e3 * (time.thread_time() - begin)
            times.add(part, parts[part])
            return result

        return call

    for owner, name, part in changed:
        setattr(owner, name, timed(getattr(owner, name), part))
    try:
        yield parts
    finally:
        for owner, name, _ in changed:
            delattr(owner, name)


if __name__ == "__main__":
    main(sys.argv[1:])
