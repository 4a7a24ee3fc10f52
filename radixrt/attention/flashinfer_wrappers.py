"""Wraps FlashInfer's decode, prefill and cascade wrappers: their shared memory, planning and runs;
and the rules that choose among its kernels.

A wrapper is planned on the host for the page tables of a step, and run once per layer. See the
library's ``flashinfer/decode.py`` and ``flashinfer/prefill.py``. No number of the rules has been
measured on a GPU yet: they follow from the design of the kernels, and ``make gpu-check`` measures
them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixrt.attention.backend import AttentionSetup, AttentionSpec
from radixrt.attention.kv_spec import LayerKV
from radixrt.attention.metadata import CascadeTables, PageTable
from radixrt.device.device import DeviceEvent

HEAD_DIMS = (64, 128, 256)
"""For which FlashInfer has kernels."""

TENSOR_CORES_FROM_GROUP = 4
"""Query heads a KV head from which decoding pays for tensor cores: their tile has 16 rows, which
fewer heads leave empty. FlashInfer's plain decode kernel has no group sizes beyond 8, and not all
below."""

FA3_TILE_QUERIES = 128
FA3_FROM_TILES = 264
"""Tiles of queries times heads from which FA3 computes a prefill: two for each of an H100's or
H200's 132 multiprocessors. FA3 doesn't split the keys of a tile among multiprocessors, so a short
extension of a long cached prefix leaves most of them idle; FA2 does."""

MEMORY_BYTES_PER_S = 4.0e12
ATTENTION_FLOPS_PER_S = 4.0e14
CASCADE_OVERHEAD_S = 20e-6
"""Fixed cost of a cascade a layer: two more kernels, and the partial results that they write."""

CASCADE_GRAPH_FROM_ROWS = 4
"""Smaller decode steps have no graph with a cascade."""

PrefillKernel = Literal["fa2", "fa3"]


def decode_with_tensor_cores(spec: AttentionSpec) -> bool:
    """Decode by the prefill kernel, whose rows are the query heads of one KV head."""
    return spec.num_heads // spec.num_kv_heads >= TENSOR_CORES_FROM_GROUP


def prefill_kernel(query_lengths: NDArray[np.integer], num_heads: int) -> PrefillKernel:
    """The kernel for prefills of these lengths [rows], where both run."""
    tiles = -(-query_lengths // FA3_TILE_QUERIES)
    return "fa3" if int(tiles.sum()) * num_heads >= FA3_FROM_TILES else "fa2"


def graph_groups(rows: int) -> int:
    """Number of groups in a captured cascade of ``rows`` rows.

    A graph's kernels have tiles for the largest possible group, ``rows - groups + 1``: with as many
    groups as rows they would have the smallest tiles, and read shared pages once for each four or
    so queries.
    """
    return min(rows, max(3, rows // 8))


def cascade_pays(
    group_sizes: NDArray[np.integer],
    shared_tokens: NDArray[np.integer],
    spec: AttentionSpec,
    kv_bytes: int,
) -> bool:
    """Reading each shared prefix once saves a layer more time than the cascade costs it.

    Without it every sequence reads the prefix from memory; with it a group reads it once, and
    computes as a prefill does, where arithmetic may take longer than reading.

    Args:
        group_sizes: [groups] decoding sequences that share a prefix.
        shared_tokens: [groups] length of that prefix.
        kv_bytes: of one number in the cache.
    """
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * kv_bytes
    token_flops = 4 * spec.num_heads * spec.head_dim  # scores and values, for one query
    reads_alone_s = token_bytes * (group_sizes * shared_tokens) / MEMORY_BYTES_PER_S
    reads_once_s = token_bytes * shared_tokens / MEMORY_BYTES_PER_S
    computes_s = token_flops * (group_sizes * shared_tokens) / ATTENTION_FLOPS_PER_S
    with_cascade_s = np.maximum(reads_once_s, computes_s).sum() + CASCADE_OVERHEAD_S
    return bool(reads_alone_s.sum() > with_cascade_s)


WORKSPACE_BYTES = 128 << 20
"""For the partial results of rows with split keys; the size that FlashInfer recommends."""
PARTIAL_RESULTS = 6
"""Number of float32 results that a captured decode step reserves per row and head (``PrefillPlan``
in its ``attention/scheduler.cuh``: with tiles of 16 rows and a group of 4, five)."""
PLAN_BYTES = 8 << 20
"""For the data of one plan; FlashInfer's default size."""


@dataclass(frozen=True, slots=True)
class TableBuffers:
    """Where a graph's page tables lie, on the device."""

    qo_indptr: Tensor  # [rows + 1] int32
    kv_indptr: Tensor  # [rows + 1] int32
    kv_indices: Tensor  # [as many pages as a step may have] int32
    last_page_len: Tensor  # [rows] int32


class SharedBuffers:
    """Memory that all wrappers of a worker use, one after the other.

    A wrapper uses the contents of its workspace during one run only. A graph reads plans and page
    tables only in the replay that follows the plan. Therefore all wrappers can share one buffer of
    each kind.
    """

    def __init__(self, setup: AttentionSetup, library: Any) -> None:
        self.setup = setup
        self.library = library
        self._place = setup.device.torch_device
        sizes = [
            spec.num_heads * (spec.head_dim + 1)
            for spec in setup.specs
            if not any(kept.is_latent for kept in setup.kv_specs)
        ]
        partial = PARTIAL_RESULTS * setup.max_rows * max(sizes, default=0) * 4
        self.workspace = self._bytes(max(WORKSPACE_BYTES, partial))
        self._plans: dict[tuple[str, AttentionSpec], Tensor] = {}
        self._tables: dict[str, TableBuffers] = {}
        self._locations: Tensor | None = None
        self._sharing: Tensor | None = None
        self._whole_cache: WholeCache | None = None

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._place)

    def _ints(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._place)

    def plan(self, place: str, spec: AttentionSpec) -> Tensor:
        """For the plans of those graphs' wrappers that have this place in a layer of this kind."""
        if (place, spec) not in self._plans:
            self._plans[place, spec] = self._bytes(PLAN_BYTES)
        return self._plans[place, spec]

    def reserve(self, places: Sequence[str]) -> None:
        """Make the page tables and plans of these places, and the buffers of the largest step."""
        for place in places:
            self.tables(place, self.setup.max_rows)
            for spec in set(self.setup.specs):
                self.plan(place, spec)
        self.locations(self.setup.max_rows)
        self.sharing(self.setup.max_rows)

    def tables(self, place: str, rows: int) -> TableBuffers:
        """Buffers of page tables, shared by all graphs' wrappers with this place in a layer, for
        all kinds of layers."""
        if place not in self._tables:
            most = self.setup.max_rows
            self._tables[place] = TableBuffers(
                self._ints(most + 1),
                self._ints(most + 1),
                self._ints(most * self.setup.max_pages),
                self._ints(most),
            )
        all_rows = self._tables[place]
        return TableBuffers(
            all_rows.qo_indptr[: rows + 1],
            all_rows.kv_indptr[: rows + 1],
            all_rows.kv_indices,
            all_rows.last_page_len[:rows],
        )

    def locations(self, rows: int) -> Tensor:
        """[rows] int32: where a graph's tokens go in the cache"""
        if self._locations is None:
            self._locations = self._ints(self.setup.max_rows)
        return self._locations[:rows]

    def whole_cache(self, num_pages: int) -> "WholeCache":
        """A buffer for at least this number of pages."""
        if self._whole_cache is None or self._whole_cache.num_pages < num_pages:
            self._whole_cache = WholeCache(num_pages, self.setup.page_size, self._place)
        return self._whole_cache

    def sharing(self, rows: int) -> Tensor:
        """[rows] bool: which of a graph's sequences share a prefix"""
        if self._sharing is None:
            self._sharing = self._ints(self.setup.max_rows).bool()
        return self._sharing[:rows]


class WholeCache:
    """The page table of one sequence that owns all pages, in their order."""

    def __init__(self, num_pages: int, page_size: int, place: torch.device) -> None:
        self.num_pages = num_pages
        self.kv_indices = torch.arange(num_pages, dtype=torch.int32, device=place)
        self.kv_indptr = torch.arange(2, dtype=torch.int32, device=place) * num_pages
        self.last_page_len = torch.full((1,), page_size, dtype=torch.int32, device=place)


class Wrapper:
    """One of the library's wrappers, which attends for the layers of one kind.

    A plan is in a pinned buffer of the library's wrapper until the device copies it. The host may
    already plan the next step, and would overwrite the buffer, so a new plan waits until the device
    has read the one before. The wait is short, because the copy precedes the step's kernels.

    The library checks and prepares some forty arguments in each run, which takes the host longer
    than the launch, twice a layer where a step is launched kernel by kernel. Between the layers of
    a step only query, cache and output differ: so the arguments that the first layer's call hands
    to the compiled module are kept, and later layers put theirs in.
    """

    def __init__(self, wrapper: Any, shared: SharedBuffers, spec: AttentionSpec) -> None:
        self._wrapper = wrapper
        self._setup = shared.setup
        self._spec = spec
        self._read: DeviceEvent | None = None
        self._kernel: Any = None
        """The kernel that the first layer of the plan has called; None: it can't be repeated."""
        self._arguments: list[Any] = []
        self._places: list[int] = []
        """Positions of query, keys, values and output among the arguments."""

    def _plan(self, *tables: Tensor, **options: Any) -> None:
        """Plan for page tables; the other arguments are those of every plan. FlashInfer's window
        does not count the query itself. Its splits of fixed size are not made for CUDA graphs, so
        deterministic steps have none."""
        if self._read is not None:
            self._read.wait()
        self._kernel = None
        spec, setup = self._spec, self._setup
        self._wrapper.plan(
            *tables,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            setup.page_size,
            window_left=-1 if spec.sliding_window is None else spec.sliding_window - 1,
            logits_soft_cap=spec.soft_cap,
            sm_scale=spec.scale,
            q_data_type=setup.dtype,
            kv_data_type=setup.kv_dtype,
            non_blocking=True,
            disable_split_kv=setup.deterministic,
            **options,
        )
        self._read = setup.device.record_event()

    def run_with_lse(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> Tensor:
        """Attend, and return the base-2 logarithm of each softmax's sum, [tokens, num_heads]
        float32."""
        return self._wrapper.run(query, kv_cache, out=out, return_lse=True)[1]

    def run(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> None:
        """``query`` and ``out`` are [tokens, num_heads, head_dim]."""
        if self._kernel is None:
            self._run_first(query, kv_cache, out)
            return
        arguments = self._arguments
        q, k, v, o = self._places
        arguments[q], arguments[o] = query, out
        arguments[k], arguments[v] = kv_cache
        self._kernel(*arguments)
        # Nothing is kept alive from layer to layer.
        arguments[q] = arguments[k] = arguments[v] = arguments[o] = None

    def _run_first(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> None:
        """Run through the library, and record its kernel call for later layers if the call can be
        repeated."""
        wrapper = self._wrapper
        module = getattr(wrapper, "_cached_module", None)
        if module is None:
            wrapper.run(query, kv_cache, out=out)
            return
        watched = _WatchedModule(module)
        wrapper._cached_module = watched
        try:
            wrapper.run(query, kv_cache, out=out)
        finally:
            wrapper._cached_module = module
        if len(watched.calls) != 1:
            return
        ((kernel, arguments),) = watched.calls
        tensors = (query, *kv_cache, out)
        places = [[i for i, found in enumerate(arguments) if found is tensor] for tensor in tensors]
        if all(len(found) == 1 for found in places):
            self._kernel, self._arguments = kernel, list(arguments)
            self._places = [found[0] for found in places]
            for place in self._places:
                self._arguments[place] = None


class _WatchedModule:
    """A compiled module that keeps how its kernels were called."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._module, name)

        def call(*arguments: Any) -> Any:
            self.calls.append((kernel, arguments))
            return kernel(*arguments)

        return call


class Decode(Wrapper):
    """One query a row.

    Args:
        graph_rows: number of rows of its graph; None: no graph, for steps with any number of rows.
        place: in a layer. Wrappers of one place read the same page tables in a step.
    """

    def __init__(
        self,
        shared: SharedBuffers,
        spec: AttentionSpec,
        graph_rows: int | None = None,
        place: str = "decode",
    ) -> None:
        buffers = None if graph_rows is None else shared.tables(place, graph_rows)
        wrapper = shared.library.BatchDecodeWithPagedKVCacheWrapper(
            shared.workspace,
            kv_layout="NHD",
            use_cuda_graph=buffers is not None,
            # The other decode kernel splits keys by the batch.
            use_tensor_cores=shared.setup.deterministic or decode_with_tensor_cores(spec),
            paged_kv_indptr_buffer=buffers and buffers.kv_indptr,
            paged_kv_indices_buffer=buffers and buffers.kv_indices,
            paged_kv_last_page_len_buffer=buffers and buffers.last_page_len,
            backend="fa2",
        )
        if buffers is not None:
            wrapper.reset_workspace_buffer(shared.workspace, shared.plan(place, spec))
        super().__init__(wrapper, shared, spec)

    def plan(self, table: PageTable) -> None:
        self._plan(table.kv_indptr, table.kv_indices, table.last_page_len)


class Prefill(Wrapper):
    """Several queries a row: the last positions of the row, with a causal mask.

    Args:
        causal: False: the queries of a row see all of it, the shared part of a cascade.
        graph_rows: number of rows of its graph; None: no graph.
    """

    def __init__(
        self,
        shared: SharedBuffers,
        spec: AttentionSpec,
        kernel: PrefillKernel = "fa2",
        *,
        causal: bool = True,
        graph_rows: int | None = None,
    ) -> None:
        self.kernel = kernel
        self._causal = causal
        buffers = None if graph_rows is None else shared.tables("shared", graph_rows)
        wrapper = shared.library.BatchPrefillWithPagedKVCacheWrapper(
            shared.workspace,
            kv_layout="NHD",
            use_cuda_graph=buffers is not None,
            qo_indptr_buf=buffers and buffers.qo_indptr,
            paged_kv_indptr_buf=buffers and buffers.kv_indptr,
            paged_kv_indices_buf=buffers and buffers.kv_indices,
            paged_kv_last_page_len_buf=buffers and buffers.last_page_len,
            backend=kernel,
        )
        if buffers is not None:
            wrapper.reset_workspace_buffer(shared.workspace, shared.plan("shared", spec))
        super().__init__(wrapper, shared, spec)

    def plan(self, table: PageTable) -> None:
        tables = table.qo_indptr, table.kv_indptr, table.kv_indices, table.last_page_len
        self._plan(*tables, causal=self._causal)


class Cascade:
    """One query a row, where groups of rows share a prefix (Juravsky et al., 2024; FlashInfer's
    cascade).

    A group's queries see the shared pages as one prefill without a causal mask, so these are read
    once for all of them; each row then sees its own pages, and the two results are merged by their
    softmax sums.

    Args:
        graph_rows: as of :class:`Decode`. There are :func:`graph_groups` groups then, of which some
            are empty.
    """

    def __init__(
        self, shared: SharedBuffers, spec: AttentionSpec, graph_rows: int | None = None
    ) -> None:
        groups = None if graph_rows is None else graph_groups(graph_rows)
        self._library = shared.library
        self._own = Decode(shared, spec, graph_rows, place="own")
        self._shared = Prefill(shared, spec, causal=False, graph_rows=groups)
        self._fixed_sharing = None if graph_rows is None else shared.sharing(graph_rows)
        self._sharing: Tensor | None = self._fixed_sharing

    def plan(self, tables: CascadeTables) -> None:
        self._own.plan(tables.own)
        self._shared.plan(tables.shared)
        if self._fixed_sharing is None:
            self._sharing = tables.sharing
        else:
            self._fixed_sharing.copy_(tables.sharing)

    def run(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> None:
        """``query`` and ``out`` are [rows, num_heads, head_dim]."""
        self.run_with_lse(query, kv_cache, out)

    def run_with_lse(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> Tensor:
        """Attend, and return the base-2 logarithm of each softmax's sum, [rows, num_heads]
        float32."""
        of_prefix = torch.empty_like(out)
        prefix_lse = self._shared.run_with_lse(query, kv_cache, of_prefix)
        lse = self._own.run_with_lse(query, kv_cache, out)
        # Rows without a prefix have nothing to merge; the result of an empty group is not used.
        self._library.merge_state_in_place(out, lse, of_prefix, prefix_lse, mask=self._sharing)
        return lse


def run_with_sinks(
    wrapper: Wrapper | Cascade,
    query: Tensor,
    kv_cache: LayerKV,
    out: Tensor,
    sinks: Tensor | None,
) -> None:
    """Run a wrapper; ``sinks`` ([num_heads] float32, see ``AttentionBackend.attend``) are one more
    term of each softmax's sum.

    Not yet run on a GPU.
    """
    if sinks is None:
        wrapper.run(query, kv_cache, out)
        return
    lse = wrapper.run_with_lse(query, kv_cache, out) * math.log(2)
    out.mul_((lse - sinks).sigmoid().unsqueeze(-1))
