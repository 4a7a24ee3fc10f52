"""``GOMP_SPINCOUNT=2000 python -m bench.worker_steps --model-path FOLDER``: steps of the worker alone, and where their time goes.

No server runs: the difference between these times and a server's is what the other processes cost. (A server sets the
variable itself, see ``radixrt.supervisor.supervisor``.) The second table is of a decode step's tape, every call of it timed.
"""

import argparse
import dataclasses
import statistics
import time
from collections import defaultdict

import numpy as np
import torch

from radixrt.base.config import ServerConfig
from radixrt.base.sampling_params import SamplingParams
from radixrt.device.device import CPU
from radixrt.layers.parallel import TensorParallel
from radixrt.messages.ids import pack_ids
from radixrt.messages.steps import Admit, Prefill, StepPlan
from radixrt.models.checkpoint import resolve_model_path
from radixrt.worker.build import build_runner
from radixrt_kernels.tape import Tape

STEPS = 20


class Steps:
    """A runner whose sequences have pages for ``context`` and ``STEPS`` tokens."""

    def __init__(self, config: ServerConfig) -> None:
        folder = resolve_model_path(config.model_path)
        self.runner, info = build_runner(
            dataclasses.replace(config, model_path=str(folder)),
            CPU,
            TensorParallel(),
            folder / "tokenizer.json",
            print,
        )
        self._page_size = info.page_size
        self._vocab_size = info.vocab_size
        self._random = np.random.default_rng(0)
        self._next_step = 0
        self._held: list[int] = []

    def prefill(self, batch: int, tokens: int) -> float:
        """Seconds to compute ``batch`` prompts of ``tokens`` in one step; they stay until the next call."""
        pages = -(-(tokens + 2 * STEPS) // self._page_size)
        admit, prefill = [], []
        for slot in range(batch):
            prompt = self._random.integers(300, self._vocab_size - 300, tokens).astype(np.int32)
            own = pack_ids(range(slot * pages, (slot + 1) * pages))
            admit.append(Admit(slot, pack_ids(prompt), 0, own, SamplingParams(temperature=0), 0))
            prefill.append(Prefill(slot, 0, tokens))
        release, self._held = self._held, list(range(batch))
        return self._seconds(release=release, admit=admit, prefill=prefill)

    def decode(self) -> float:
        """Median seconds to compute one token for each sequence that is there."""
        times = [self._seconds() for _ in range(STEPS)]
        return statistics.median(times[3:])

    def _seconds(self, **changes) -> float:
        plan = StepPlan(step_id=self._next_step, **changes)
        self._next_step += 1
        begin = time.perf_counter()
        self.runner.step(plan)
        return time.perf_counter() - begin


@torch.inference_mode()
def kernel_seconds(tape: Tape) -> dict[str, float]:
    """By kernel: its calls' shortest times, summed."""
    shortest = [float("inf")] * len(tape.calls)
    for _ in range(STEPS):
        for index, (kernel, arguments) in enumerate(tape.calls):
            begin = time.perf_counter()
            kernel(*arguments)
            shortest[index] = min(shortest[index], time.perf_counter() - begin)
    sums: defaultdict[str, float] = defaultdict(float)
    for (kernel, arguments), seconds in zip(tape.calls, shortest, strict=True):
        shape = "x".join(map(str, arguments[1].shape)) if hasattr(arguments[1], "shape") else ""
        sums[f"{getattr(kernel, '__name__', kernel)} {shape}"] += seconds
    return dict(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: weights are made up")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--kernel-threads", type=int, default=None)
    arguments = parser.parse_args()
    steps = Steps(
        ServerConfig(
            model_path=arguments.model_path,
            load_format=arguments.load_format,
            quantization=arguments.quantization,
            kernel_threads=arguments.kernel_threads,
            max_total_tokens=65536,
        )
    )
    for tokens in arguments.prefill:
        steps.prefill(1, tokens)
        best = float("inf")
        for _ in range(3):
            best = min(best, steps.prefill(1, tokens))
        print(f"prefill of {tokens}: {best * 1e3:.1f} ms, {tokens / best:.0f} tokens/s", flush=True)
    for batch in arguments.batches:
        steps.prefill(batch, arguments.context)
        seconds = steps.decode()
        print(f"decode of {batch} x {arguments.context}: {seconds * 1e3:.2f} ms", flush=True)
        tapes = steps.runner._tapes
        tape = tapes and tapes._tapes.get(batch)
        if tape:
            parts = kernel_seconds(tape)
            for name, part in sorted(parts.items(), key=lambda item: -item[1]):
                print(f"    {name}: {part * 1e3:.2f} ms")
            print(f"    all calls of the tape: {sum(parts.values()) * 1e3:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
