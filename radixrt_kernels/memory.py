"""Large tensors in pages of 2 MiB: reading them at random needs fewer walks through the page table."""

import torch

from radixrt_kernels import native


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask the operating system to back a new tensor's memory, not yet written to, with huge pages.

    Returns:
        whether it took the advice; without native kernels, for tensors below 2 MiB and outside Linux it is False
    """
    return native is not None and bool(native.advise_huge_pages(tensor))
