"""RMSNorm and the residual addition before it are what torch computes."""

import pytest
import torch

from radixrt_kernels import norm
from radixrt_kernels.reference.norm import rms_norm

TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Two units in the last place: another order of summation may round another way, before the weight
and after."""


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_size_is_what_torch_computes(isa: str, dtype: torch.dtype, unit_offset: bool) -> None:
    for tokens, size in [(0, 8), (1, 1), (2, 15), (3, 16), (5, 33), (70, 896)]:
        hidden, weight = 3 * torch.randn(tokens, size).to(dtype), torch.randn(size).to(dtype)
        expected = rms_norm(hidden, weight, 1e-6, unit_offset)
        result = norm.rms_norm(hidden, weight, 1e-6, unit_offset)
        torch.testing.assert_close(result, expected, rtol=TOLERANCES[dtype], atol=1e-6)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_residual_is_added_and_rounded_first(
    isa: str, dtype: torch.dtype, unit_offset: bool
) -> None:
    hidden, residual = (torch.randn(9, 100).to(dtype) for _ in range(2))
    weight = torch.randn(100).to(dtype)
    total = hidden + residual
    expected = rms_norm(total, weight, 1e-5, unit_offset)
    norm.add_rms_norm_(hidden, residual, weight, 1e-5, unit_offset)
    assert torch.equal(residual, total)
    torch.testing.assert_close(hidden, expected, rtol=TOLERANCES[dtype], atol=1e-6)


def test_heads_within_a_projection_are_normed_each(isa: str) -> None:
    projection, weight = torch.randn(7, 5 * 24), torch.randn(24)
    heads = projection[:, 24 : 4 * 24].unflatten(1, (3, 24))
    torch.testing.assert_close(norm.rms_norm(heads, weight, 1e-6), rms_norm(heads, weight, 1e-6))


def test_a_row_of_zeros_and_a_huge_row_are_what_torch_computes(isa: str) -> None:
    hidden = torch.stack((torch.zeros(20), torch.full((20,), 1e18), torch.full((20,), torch.nan)))
    weight = torch.ones(20)
    torch.testing.assert_close(
        norm.rms_norm(hidden, weight, 1e-6), rms_norm(hidden, weight, 1e-6), equal_nan=True
    )


@pytest.mark.parametrize(
    ("hidden", "weight", "message"),
    [
        (torch.zeros(4), torch.zeros(4), "hidden must be"),
        (torch.zeros(4, 3).T, torch.zeros(4), "rows without gaps"),
        (torch.zeros(3, 4), torch.zeros(3), "weight must be"),
        (torch.zeros(3, 4), torch.zeros(4).half(), "weight must be"),
        (torch.zeros(3, 4), torch.zeros(8)[::2], "weight must be"),
    ],
)
def test_what_does_not_fit_is_refused(
    isa: str, hidden: torch.Tensor, weight: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        norm.rms_norm(hidden, weight, 1e-6)


def test_a_residual_of_another_shape_is_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="residual must be like hidden"):
        norm.add_rms_norm_(torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(4), 1e-6)
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        norm.rms_norm(torch.zeros(3, 4).int(), torch.zeros(4).int(), 1e-6)
