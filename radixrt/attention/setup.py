"""The facts that an attention backend is made for; they hold for the life of a worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from radixrt.attention.backend import AttentionSpec
from radixrt.attention.kv_spec import KVSpec
from radixrt.device.device import CPU, Device


@dataclass(frozen=True, slots=True)
class AttentionSetup:
    """The model's layers on this rank, their KV caches, the device, and the largest step."""

    specs: Sequence[AttentionSpec] = ()
    """Specifications of the layers with attention; many are equal."""
    dtype: torch.dtype = torch.float32
    """Dtype of queries, keys and values."""
    kv_dtype: torch.dtype = torch.float32
    """Dtype of keys and values in the KV cache."""
    page_size: int = 16
    max_rows: int = 256
    """Sequences in a step."""
    max_pages: int = 1024
    """Pages of one sequence."""
    prefill_kernel: Literal["auto", "fa2", "fa3"] = "auto"
    """FlashInfer's kernel for prompts; auto: by the step."""
    device: Device = CPU
    cascade: bool = True
    """Prefixes that decoding sequences share may be read once for all of them."""
    kv_specs: Sequence[KVSpec] = ()
    """KV of all layers; empty for those without attention."""
    deterministic: bool = False
    """FlashInfer never splits the keys of a row, whatever the batch."""

    def why_not_plain(self, *, latents: bool = False) -> str | None:
        """The reason why kernels that read keys and values of one shape in ``kv_dtype`` cannot
        serve this model; None if they can.

        Args:
            latents: they also read latents.
        """
        for kept in self.kv_specs:
            if not (kept.is_plain(self.kv_dtype) or (latents and kept.is_latent)):
                return (
                    f"it reads keys and values of one shape, and a layer of this model keeps {kept}; use "
                    "--attention-backend torch_reference"
                )
        return None
