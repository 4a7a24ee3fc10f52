"""One thing to measure: a kernel, what PyTorch does instead, and how much there is to read and to compute."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kernel: Callable[[], object]
    reference: Callable[[], object]
    num_bytes: float
    """Least that has to be moved."""
    operations: float
    """Of floating point."""
    dtype: torch.dtype
    in_cache: bool = False
    """What is read was just written, or is small: the memory is no limit."""
