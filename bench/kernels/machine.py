"""What is measured, and the machine's limits, measured with as many threads as the kernels use."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel, what PyTorch does instead, and how much there is to read and to compute."""

    name: str
    kernel: Callable[[], object]
    reference: Callable[[], object]
    num_bytes: float
    """Least that has to be moved."""
    operations: float
    """Floating-point operations."""
    dtype: torch.dtype
    in_cache: bool = False
    """What is read was just written, or is small: the memory is no limit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The two limits of any kernel."""

    bytes_per_second: float
    """Read from memory."""
    flops: dict[torch.dtype, float]
    """Floating-point operations per second in a large matrix product."""

    def bound_s(self, num_bytes: float, operations: float, dtype: torch.dtype) -> float:
        """No kernel that reads so many bytes and computes so much can take less."""
        return max(num_bytes / self.bytes_per_second, operations / self.flops[dtype])


def measure() -> Machine:
    """Takes some seconds."""
    block = torch.ones(1 << 27, dtype=torch.float32)
    read_s = best_seconds(block.sum, 8)
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(2048, 2048, dtype=dtype)
        flops[dtype] = 2 * 2048**3 / best_seconds(partial(torch.matmul, square, square), 5)
    return Machine(block.nbytes / read_s, flops)


def best_seconds(run: Callable[[], object], repetitions: int) -> float:
    """The shortest of several runs: other processes only ever add to it."""
    run()
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
