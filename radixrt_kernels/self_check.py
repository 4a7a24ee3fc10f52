"""Does each kernel compute on this machine what its reference says? Run by ``python -m radixrt_kernels``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from radixrt_kernels import activation
from radixrt_kernels.reference import activation as reference_activation


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a kernel with its reference."""

    name: str
    result: torch.Tensor
    expected: torch.Tensor
    tolerance: float
    """Largest difference allowed, relative to the largest expected value."""

    @property
    def error(self) -> float:
        """Largest difference, relative to the largest expected value."""
        expected = self.expected.double()
        return float((self.result.double() - expected).abs().max() / expected.abs().max())

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""What one rounding to a dtype and another order of summation may change."""


def activations() -> Iterator[Check]:
    for dtype, tolerance in ROUNDING.items():
        gate_up = torch.randn(5, 2 * 123).to(dtype)
        for name, kernel in {
            "silu": activation.silu_and_mul,
            "gelu": activation.gelu_and_mul,
            "gelu_tanh": activation.gelu_tanh_and_mul,
        }.items():
            expected = reference_activation.gated_activation(gate_up, name)
            yield Check(f"{name}_and_mul {dtype}", kernel(gate_up), expected, tolerance)


CHECKS: list[Callable[[], Iterator[Check]]] = [activations]
"""One function a kernel family."""
