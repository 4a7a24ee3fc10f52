"""``GOMP_SPINCOUNT=2000 python -m bench.worker_steps --model-path FOLDER``: steps of the worker alone, and where their time goes.

No server runs: the difference between these times and a server's is what the other processes cost. (A server sets the
variable itself, see ``radixrt.supervisor.supervisor``.) The second table is of a decode step's tape, every call of it timed.
"""

import argparse
import dataclasses
import statistics
import time
from collections import defaultdict
from itertools import chain

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
    """A runner whose sequences have pages for ``room`` tokens behind their prompts."""

    def __init__(self, config: ServerConfig, room: int) -> None:
        self._room = room
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

    def prefill(self, batch: int, tokens: int, cached: int = 0) -> float:
        """Seconds to compute ``batch`` prompts of ``tokens`` in one step, but ``cached`` tokens of each, whose KV is there; they stay
        until the next call."""
        pages = self._pages(tokens + self._room)
        admit, prefill = [], []
        for slot in range(batch):
            prompt = self._random.integers(300, self._vocab_size - 300, tokens).astype(np.int32)
            own = pack_ids(range(slot * pages, (slot + 1) * pages))
            sampling = SamplingParams(temperature=0)
            admit.append(Admit(slot, pack_ids(prompt), cached, own, sampling, 0))
            prefill.append(Prefill(slot, cached, tokens - cached))
        release, self._held = self._held, list(range(batch))
        return self._seconds(release=release, admit=admit, prefill=prefill)

    @torch.inference_mode()
    def fill(self, batch: int, tokens: int) -> None:
        """Put ``batch`` sequences there, each with a copy of the KV of one prompt of ``tokens``."""
        self.prefill(1, tokens)
        pages, used = self._pages(tokens + self._room), self._pages(tokens)
        for cache in chain.from_iterable(self.runner._context.kv_caches):
            for slot in range(1, batch):
                cache[slot * pages : slot * pages + used] = cache[:used]
        self.prefill(batch, tokens, cached=tokens - 1)

    def decode(self) -> float:
        """Median seconds to compute one token for each sequence that is there."""
        times = [self._seconds() for _ in range(STEPS)]
        return statistics.median(times[3:])

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._page_size)

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
    parser.add_argument("--prefill", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--kernel-threads", type=int, default=None)
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], help="decode steps of several kinds are measured by turns")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=1, help="of turns")
    arguments = parser.parse_args()
    room = (arguments.rounds + 1) * STEPS
    runners = {
        kind: Steps(
            ServerConfig(
                model_path=arguments.model_path,
                load_format=arguments.load_format,
                quantization=arguments.quantization,
                kernel_threads=arguments.kernel_threads,
                kv_cache_dtype=kind,
                max_total_tokens=max(
                    65536, max(arguments.batches) * (arguments.context + room + 64)
                ),
            ),
            room,
        )
        for kind in arguments.kv_cache_dtype
    }
    for tokens in arguments.prefill:
        for kind, steps in runners.items():
            steps.prefill(1, tokens)
            best = min(steps.prefill(1, tokens) for _ in range(3))
            print(f"prefill of {tokens}{_of(kind)}: {best * 1e3:.1f} ms, {tokens / best:.0f} tokens/s", flush=True)  # fmt: skip
    for batch in arguments.batches:
        _measure_decode(runners, batch, arguments.context, arguments.rounds)


def _measure_decode(runners: dict[str, Steps], batch: int, context: int, rounds: int) -> None:
    """Print the time of a step of each runner, by turns, and its kernels' times."""
    for steps in runners.values():
        steps.fill(batch, context)
    turns = [{kind: steps.decode() for kind, steps in runners.items()} for _ in range(rounds)]
    first = next(iter(runners))
    for kind, steps in runners.items():
        times = [turn[kind] * 1e3 for turn in turns]
        line = f"decode of {batch} x {context}{_of(kind)}: {statistics.median(times):.2f} ms"
        if rounds > 1:
            line += f" ({min(times):.2f} to {max(times):.2f})"
        if kind != first:
            ratios = [turn[first] / turn[kind] for turn in turns]
            line += f", {statistics.median(ratios):.2f} times as fast as {first} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(line, flush=True)
        tapes = steps.runner._tapes
        tape = tapes and tapes._make(batch, by_rows=False)
        if tape:
            parts = kernel_seconds(tape)
            for name, part in sorted(parts.items(), key=lambda item: -item[1]):
                print(f"    {name}: {part * 1e3:.2f} ms")
            print(f"    all calls of the tape: {sum(parts.values()) * 1e3:.2f} ms", flush=True)


def _of(kind: str) -> str:
    return "" if kind == "auto" else f" with a KV cache in {kind}"


if __name__ == "__main__":
    main()
