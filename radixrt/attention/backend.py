"""The interface between a model's attention layers and the kernels that compute attention."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from radixrt.attention.auxiliary import AuxiliaryStates
from radixrt.attention.kv_spec import KVSpec, LayerKV
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.states import StateTables
from radixrt.device.device import CPU, Device


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The constants of one attention layer, on this tensor-parallel rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Features of a head of queries and keys; that of values is in the layer's :class:`KVSpec`."""
    scale: float
    """Factor of the scores."""
    sliding_window: int | None = None
    """A query sees itself and the ``sliding_window - 1`` tokens before it; None: everything before
    it."""
    soft_cap: float | None = None
    """Scores become ``soft_cap * tanh(scores / soft_cap)`` (Gemma 2)."""
    whole_images: bool = True
    """The tokens of an image see one another, in models whose images are whole; not so in the
    layers of Gemma 4 without a window."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The inputs of one attention layer in one step."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    key: Tensor | None
    """[num_tokens, num_kv_heads, head_dim], of the step's tokens. None, as is ``value``, where the
    layer reads the cache of an earlier layer, which has written them."""
    value: Tensor | None
    """[num_tokens, num_kv_heads, v_head_dim]. Where the cache has one tensor, values are the first
    ``v_head_dim`` features of the keys (a latent cache)."""
    kv_cache: LayerKV
    """The cache of this layer, or of the earlier one."""
    spec: AttentionSpec
    sinks: Tensor | None = None
    """float32 [num_heads]: for each head a score that takes part in the softmax of every query and
    has no value (Xiao et al., 2023; gpt-oss). None: there are none."""

    def new_output(self) -> Tensor:
        """An empty result: [num_tokens, num_heads, v_head_dim]"""
        width = self.query.shape[-1] if self.value is None else self.value.shape[-1]
        return self.query.new_empty((*self.query.shape[:-1], width))


class AttentionBackend(ABC):
    """Computes attention for all layers of one worker; a worker has one instance."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare for one step; called once before the layers run. Host work only."""

    @abstractmethod
    def attend(self, step: AttentionInputs) -> Tensor:
        """Write the step's keys and values into the cache, then attend over it.

        Returns:
            [num_tokens, num_heads, v_head_dim]
        """

    def for_rows(self, rows: Tensor) -> "AttentionBackend | None":
        """A backend that is planned for these rows [n] int64 of the step alone, for layers that
        write nothing into a cache; None: it computes no such selection."""
        return None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The inputs of a model's layers beside the hidden states. Passed as an argument, never
    global."""

    backend: AttentionBackend
    kv_caches: list[LayerKV]
    """One a layer; empty for a layer that reads an earlier one's, or keeps a state instead."""
    states: StateTables | None = None
    """The states of recurrent layers; None: the model has none."""
    auxiliary: AuxiliaryStates | None = None
    """Gets the inputs of some layers; None: nobody reads them."""

    def narrowed(self, rows: Tensor) -> "ForwardContext | None":
        """The context of these rows of the step alone; None: the backend needs all of them."""
        backend = self.backend.for_rows(rows)
        return None if backend is None else replace(self, backend=backend)


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
    head_specs: Sequence[KVSpec] = ()
    """What pages hold beside the KV of the layers, for a draft head."""

    @property
    def page_specs(self) -> list[KVSpec]:
        """All that pages hold: the KV of the layers, then what a draft head keeps."""
        return [*self.kv_specs, *self.head_specs]

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
