"""Numbers that kernels are tested with, and how close two results have to be."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ULPS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""By how much two results may differ: one unit in the last place of a half-precision number."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers on the device under test."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, *, ulps: float = 1.0, near_zero: float = 1e-2
) -> None:
    """Equal up to ``ulps`` roundings to their dtype, and near zero up to ``near_zero`` roundings of 1."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    ulp = ULPS[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=ulps * ulp, atol=near_zero * ulp)
