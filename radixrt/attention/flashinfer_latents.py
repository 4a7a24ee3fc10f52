"""Wraps FlashInfer's kernel for multi-head latent attention, whose cache is one tensor a layer.

Not yet run on a GPU.
"""

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from radixrt.attention.backend import AttentionSetup, AttentionSpec
from radixrt.attention.flashinfer_wrappers import PrefillKernel, SharedBuffers
from radixrt.attention.kv_spec import LayerKV
from radixrt.attention.metadata import AttentionMetadata, PageTable
from radixrt.device.device import DeviceEvent

LATENT_UNIT, ROPE_UNIT = 128, 64
"""The kernel's sizes of latents and of rotated keys are multiples of these."""


def why_not_latents(setup: AttentionSetup) -> str | None:
    """The reason for which the kernel cannot read the latents of this model; None: it can."""
    (kept, *others) = set(setup.kv_specs)
    if others:
        return "its kernel for latents needs the same in all layers"
    width = kept.tensors[0].shape[-1]
    latent = kept.latent_dim or 0
    if latent % LATENT_UNIT or (width - latent) % ROPE_UNIT:
        return (
            f"its kernel for latents takes multiples of {LATENT_UNIT} features and {ROPE_UNIT} rotated ones, and this model "
            f"has {latent} and {width - latent}"
        )
    if setup.kv_dtype != setup.dtype:
        return "its kernel reads latents in the activations' type alone: use --kv-cache-dtype auto"
    if setup.deterministic:
        return "its kernel for latents splits keys by the batch: leave --deterministic out"
    return None


class AppendLatents:
    """Writes a step's latents into the cache."""

    def __init__(self, locations: Tensor | None = None) -> None:
        """
        Args:
            locations: [rows] int32 on the device: where a graph looks for the locations of a step;
                None: anew for each.
        """
        self._fixed_locations = locations
        self._locations = locations

    def plan(self, metadata: AttentionMetadata) -> None:
        if self._fixed_locations is None:
            self._locations = metadata.kv_locations
        else:
            self._fixed_locations.copy_(metadata.kv_locations)

    def run(self, key: Tensor | None, value: Tensor | None, kv_cache: LayerKV) -> None:
        """``key`` is [num_tokens, 1, latent + rotated features]; ``value`` is a part of it."""
        if key is None:
            return
        assert self._locations is not None, "plan() comes before attend()"
        kv_cache[0].flatten(0, 1).index_put_((self._locations,), key)


class Latents:
    """Queries over latents, any number of each row: the last positions of the row, with a causal
    mask.

    The kernel takes 64 or 128 (query, head) pairs at once, and refuses batches in which such a tile
    ends within a query at some lengths. So heads are filled up to a power of two, of GLM-4.7-Flash
    20 to 32.
    """

    def __init__(
        self,
        shared: SharedBuffers,
        spec: AttentionSpec,
        kernel: PrefillKernel,
        graph_rows: int | None = None,
    ) -> None:
        """
        Args:
            graph_rows: number of rows of its graph; None: no graph.
        """
        self.kernel = kernel
        self._shared, self._spec = shared, spec
        self._latent = shared.setup.kv_specs[0].latent_dim or 0
        self._heads = 1 << (spec.num_heads - 1).bit_length()
        self._read: DeviceEvent | None = None
        buffers = None if graph_rows is None else shared.tables("decode", graph_rows)
        self._wrapper = shared.library.BatchMLAPagedAttentionWrapper(
            shared.workspace,
            use_cuda_graph=buffers is not None,
            qo_indptr=buffers and buffers.qo_indptr,
            kv_indptr=buffers and buffers.kv_indptr,
            kv_indices=buffers and buffers.kv_indices,
            kv_len_arr=buffers and buffers.last_page_len,
            backend=kernel,
        )

    def plan(self, table: PageTable) -> None:
        """Plan once the device has read the plan before, as other wrappers do."""
        if self._read is not None:
            self._read.wait()
        setup, spec = self._shared.setup, self._spec
        pages = np.diff(table.kv_indptr.numpy())
        lengths = (pages - 1) * setup.page_size + table.last_page_len.numpy()
        (kv_lengths,) = setup.device.pin(lengths.astype(np.int32))
        self._wrapper.plan(
            metadata=self._shared.library.mla.MLAPlanMetadata.csr(
                table.qo_indptr, table.kv_indptr, table.kv_indices, kv_lengths
            ),
            num_heads=self._heads,
            head_dim_ckv=self._latent,
            head_dim_kpe=spec.head_dim - self._latent,
            page_size=setup.page_size,
            causal=True,
            sm_scale=spec.scale,
            q_data_type=setup.dtype,
            kv_data_type=setup.kv_dtype,
        )
        self._read = setup.device.record_event()

    def run(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> None:
        """``query`` is [tokens, num_heads, latent + rotated features], ``out`` [tokens, num_heads,
        latent]."""
        more, cache = self._heads - self._spec.num_heads, kv_cache[0].squeeze(2)
        if not more:
            self._wrapper.run(query=query, kv_cache=cache, out=out)
            return
        filled = F.pad(query, (0, 0, 0, more))
        out.copy_(self._wrapper.run(query=filled, kv_cache=cache)[:, : self._spec.num_heads])
