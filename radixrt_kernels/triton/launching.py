"""Block sizes and strides for kernel launches."""

import torch
import triton


def block_of(size: int, at_most: int = 1 << 30) -> int:
    """The smallest power of two of at least ``size``, limited to ``at_most`` (a power of two)."""
    return min(triton.next_power_of_2(max(1, size)), at_most)


def warps_for(elements: int) -> int:
    """Number of warps for a program with ``elements`` numbers: about 16 per thread, at most 16
    warps."""
    return max(1, min(16, triton.next_power_of_2(elements // 512)))


def rows_of(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """The row layout of a tensor [..., size].

    Args:
        tensor: [rows, size] or [rows, heads, size], with a contiguous last dimension; it may be a
            view of a wider tensor.

    Returns:
        (rows, heads, stride of rows, stride of heads), heads 1 for two dimensions
    """
    if tensor.stride(-1) != 1:
        raise ValueError(
            f"the last dimension of {list(tensor.shape)} is not adjacent in memory: pass tensor.contiguous()"
        )
    if tensor.dim() == 2:
        return tensor.shape[0], 1, tensor.stride(0), 0
    if tensor.dim() == 3:
        return tensor.shape[0], tensor.shape[1], tensor.stride(0), tensor.stride(1)
    raise ValueError(f"expected [rows, size] or [rows, heads, size], got {list(tensor.shape)}")
