"""Requests huge pages from the operating system, and makes the C library keep freed memory."""

import torch

from radixrt_kernels import native


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Request pages of 2 MiB for a new tensor's memory, before the first write. Random reads then
    need fewer page walks.

    Returns:
        True if the operating system accepts; False without native kernels, for tensors below 2 MiB
        and outside Linux
    """
    return native is not None and bool(native.advise_huge_pages(tensor))


class Slabs:
    """Allocates tensors of bytes from large blocks with pages of 2 MiB. Alone, a tensor of some MiB
    gets few or none of them."""

    SIZE = 64 << 20

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """An uninitialised tensor, uint8 [num_bytes], at a multiple of 64 bytes."""
        if num_bytes > len(self._left):
            self._left = torch.empty(max(num_bytes, self.SIZE), dtype=torch.uint8)
            advise_huge_pages(self._left)
        taken, self._left = self._left[:num_bytes], self._left[-(-num_bytes // 64) * 64 :]
        return taken


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory. Otherwise it returns the memory to the operating
    system, which zeroes it page by page in the next step. The activations of a prefill chunk are
    tens of megabytes, several times per layer.

    Returns:
        True if the C library supports it (glibc does)
    """
    return native is not None and bool(native.keep_freed_memory())
