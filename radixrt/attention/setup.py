"""What is an attention backend made for? The facts that hold for the life of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from radixrt.attention.backend import AttentionSpec
from radixrt.device.device import CPU, Device


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """The model's layers on this rank, their KV cache, and what computes."""

    specs: Sequence[AttentionSpec] = ()
    """Of all layers; many are equal."""
    dtype: torch.dtype = torch.float32
    """Of queries, keys and values."""
    kv_dtype: torch.dtype = torch.float32
    """Of the KV cache."""
    page_size: int = 16
    max_rows: int = 256
    """Sequences in a step."""
    max_pages: int = 1024
    """Of one sequence."""
    prefill_kernel: Literal["auto", "fa2", "fa3"] = "auto"
    """Of FlashInfer, for prompts; auto: by the step."""
    device: Device = CPU
    cascade: bool = True
    """Prefixes that decoding sequences share may be read once for all of them."""
