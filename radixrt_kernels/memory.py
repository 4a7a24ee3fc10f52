"""Requests huge pages from the operating system, and makes the C library keep freed memory."""

import torch

from radixrt_kernels import native


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Request pages of 2 MiB for a new tensor's memory, before the first write. Random reads then need fewer page walks.

    Returns:
        True if the operating system accepts; False without native kernels, for tensors below 2 MiB and outside Linux
    """
    return native is not None and bool(native.advise_huge_pages(tensor))


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory. Otherwise it returns the memory to the operating system, which zeroes it page by
    page in the next step. The activations of a prefill chunk are tens of megabytes, several times per layer.

    Returns:
        True if the C library supports it (glibc does)
    """
    return native is not None and bool(native.keep_freed_memory())
