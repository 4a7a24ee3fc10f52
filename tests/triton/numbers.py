"""Numbers that kernels are tested with, and how close two results have to be."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ULPS = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""By how much two results may differ: one unit in the last place of a half-precision number."""


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers on the device under test."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


NEAR_ZERO = {torch.float32: 1.0, torch.bfloat16: 1e-2, torch.float16: 1e-2}
"""By how many roundings of 1 two results near zero may differ. Kernels compute in float32 and may
fuse a product with a sum, which leaves out the product's rounding: where products of about 1
cancel, the result in float32 is off by as much. A half-precision result has more room than that."""


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, *, ulps: float = 1.0, near_zero: float | None = None
) -> None:
    """Equal up to ``ulps`` roundings to their dtype, and near zero up to ``near_zero`` roundings of
    1 (default: see :data:`NEAR_ZERO`)."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    near_zero = NEAR_ZERO[theirs.dtype] if near_zero is None else near_zero
    ulp = ULPS[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=ulps * ulp, atol=near_zero * ulp)
