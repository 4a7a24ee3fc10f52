"""Measures the device's highest rates of memory reads and matrix products."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

WARM_UPS = 3
REPEATS = 10


@dataclass(frozen=True)
class Ceilings:
    """Rates that no step can exceed."""

    read_bytes_per_s: float
    """The best of a sum over a large tensor, and of a copy with its reads and writes counted."""
    gemm_flops_per_s: float
    """Rate of a square matrix product in the model's dtype, on random numbers: zeros run faster."""

    @staticmethod
    def measure(device: torch.device, *, small: bool = False) -> "Ceilings":
        """
        Args:
            small: sizes for a dry run.
        """
        return Ceilings(
            _read_bytes_per_s(device, 1 << 20 if small else 1 << 31),
            _gemm_flops_per_s(device, 256 if small else 8192),
        )

    def as_figures(self) -> dict[str, float]:
        return asdict(self)


def _read_bytes_per_s(device: torch.device, elements: int) -> float:
    numbers = torch.ones(elements, dtype=torch.float32, device=device)
    source, target = numbers.chunk(2)
    num_bytes = numbers.numel() * numbers.element_size()
    seconds = min(
        median_seconds(lambda: numbers.sum(), device),
        median_seconds(lambda: target.copy_(source), device),
    )
    return num_bytes / seconds


def _gemm_flops_per_s(device: torch.device, size: int) -> float:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: left @ right, device)


def median_seconds(
    work: Callable[[], object], device: torch.device, repeats: int = REPEATS
) -> float:
    """Time of one call, on the device's own clock where it has one."""
    for _ in range(WARM_UPS):
        work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
