"""Advice to the operating system and to the C library on how to hand out memory."""

import torch

from radixrt_kernels import native


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask the operating system to back a new tensor's memory, not yet written to, with pages of 2 MiB: reading it at
    random then needs fewer walks through the page table.

    Returns:
        whether it took the advice; without native kernels, for tensors below 2 MiB and outside Linux it is False
    """
    return native is not None and bool(native.advise_huge_pages(tensor))


def keep_freed_memory() -> bool:
    """Let the C library keep what the process frees, instead of returning it and getting it back page by page, zeroed, in
    the next step: a prefill chunk's activations are tens of megabytes, many times a layer.

    Returns:
        whether it will; glibc can
    """
    return native is not None and bool(native.keep_freed_memory())
