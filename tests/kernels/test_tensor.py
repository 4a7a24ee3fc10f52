"""The kernels read tensors of every version of torch, with and without DLPack's exchange table."""

import pytest
import torch

from radixrt_kernels import norm
from radixrt_kernels.reference.norm import rms_norm


class WithoutTable(torch.Tensor):
    """A tensor as torch before 2.10 makes it: its type has no exchange table."""

    __dlpack_c_exchange_api__ = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tensor_without_an_exchange_table_is_read_by_its_attributes(dtype: torch.dtype) -> None:
    rows, weight = torch.randn(5, 3, 64).to(dtype), torch.randn(64).to(dtype)
    middle = rows[:, 1].as_subclass(WithoutTable)
    result = norm.rms_norm(middle, weight.as_subclass(WithoutTable), 1e-6)
    assert torch.equal(result, norm.rms_norm(rows[:, 1], weight, 1e-6))
    tolerance = 1e-6 if dtype == torch.float32 else 1.6e-2
    expected = rms_norm(rows[:, 1], weight, 1e-6)
    torch.testing.assert_close(
        result.as_subclass(torch.Tensor), expected, rtol=tolerance, atol=1e-6
    )


def test_a_dtype_without_a_kernel_is_named_without_an_exchange_table() -> None:
    rows = torch.zeros(2, 8, dtype=torch.float64).as_subclass(WithoutTable)
    with pytest.raises(TypeError, match="float64"):
        norm.rms_norm(rows, torch.ones(8), 1e-6)
