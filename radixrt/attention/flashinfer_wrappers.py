"""Wraps FlashInfer's decode, prefill and cascade wrappers: their shared memory, planning and runs.

A wrapper is planned on the host for the page tables of a step, and run once per layer. See the
library's ``flashinfer/decode.py`` and ``flashinfer/prefill.py``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixrt.attention.backend import AttentionSpec
from radixrt.attention.flashinfer_rules import (
    PrefillKernel,
    decode_with_tensor_cores,
    graph_groups,
)
from radixrt.attention.kv_spec import LayerKV
from radixrt.attention.page_tables import CascadeTables, PageTable
from radixrt.attention.setup import AttentionSetup
from radixrt.device.device import Device, DeviceEvent

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

    def __init__(self, setup: AttentionSetup) -> None:
        self._setup = setup
        self._place = setup.device.torch_device
        sizes = [spec.num_heads * (spec.head_dim + 1) for spec in setup.specs]
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
            self.tables(place, self._setup.max_rows)
            for spec in set(self._setup.specs):
                self.plan(place, spec)
        self.locations(self._setup.max_rows)
        self.sharing(self._setup.max_rows)

    def tables(self, place: str, rows: int) -> TableBuffers:
        """Buffers of page tables, shared by all graphs' wrappers with this place in a layer, for
        all kinds of layers."""
        if place not in self._tables:
            most = self._setup.max_rows
            self._tables[place] = TableBuffers(
                self._ints(most + 1),
                self._ints(most + 1),
                self._ints(most * self._setup.max_pages),
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
            self._locations = self._ints(self._setup.max_rows)
        return self._locations[:rows]

    def whole_cache(self, num_pages: int) -> "WholeCache":
        """A buffer for at least this number of pages."""
        if self._whole_cache is None or self._whole_cache.num_pages < num_pages:
            self._whole_cache = WholeCache(num_pages, self._setup.page_size, self._place)
        return self._whole_cache

    def sharing(self, rows: int) -> Tensor:
        """[rows] bool: which of a graph's sequences share a prefix"""
        if self._sharing is None:
            self._sharing = self._ints(self._setup.max_rows).bool()
        return self._sharing[:rows]


class WholeCache:
    """The page table of one sequence that owns all pages, in their order."""

    def __init__(self, num_pages: int, page_size: int, place: torch.device) -> None:
        self.num_pages = num_pages
        self.kv_indices = torch.arange(num_pages, dtype=torch.int32, device=place)
        self.kv_indptr = torch.arange(2, dtype=torch.int32, device=place) * num_pages
        self.last_page_len = torch.full((1,), page_size, dtype=torch.int32, device=place)


class Staged:
    """A wrapper that waits with a new plan until the device has read the previous plan.

    A plan is in a pinned buffer of the wrapper until the device copies it. The host may already
    plan the next step, and would overwrite the buffer. The wait is short, because the copy precedes
    the step's kernels.
    """

    def __init__(self, wrapper: Any, device: Device) -> None:
        self._wrapper = wrapper
        self._device = device
        self._read: DeviceEvent | None = None
        self._repeated = RepeatedRun(wrapper)

    def plan(self, *arguments: Any, **options: Any) -> None:
        if self._read is not None:
            self._read.wait()
        self._repeated.forget()
        self._wrapper.plan(*arguments, **options)
        self._read = self._device.record_event()

    def run(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> None:
        """``query`` and ``out`` are [tokens, num_heads, head_dim]."""
        self._repeated.run(query, kv_cache, out)

    def run_with_lse(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> Tensor:
        """Attend, and return the base-2 logarithm of each softmax's sum, [tokens, num_heads]
        float32."""
        return self._wrapper.run(query, kv_cache, out=out, return_lse=True)[1]


class RepeatedRun:
    """A wrapper's ``run``, layer after layer of one plan.

    The library checks and prepares some forty arguments in each call, which takes the host longer
    than the launch, twice a layer where a step is launched kernel by kernel. Between the layers of
    a step only query, cache and output differ: so the arguments that the first layer's call hands
    to the compiled module are kept, and later layers put theirs in.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._kernel: Any = None
        self._arguments: list[Any] = []
        self._places: list[int] = []
        """Positions of query, keys, values and output among the arguments."""

    def forget(self) -> None:
        """The wrapper is planned anew."""
        self._kernel = None

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


def score_options(spec: AttentionSpec, setup: AttentionSetup) -> dict[str, Any]:
    """Options of every plan: scores, dtypes and splits. FlashInfer's window does not count the
    query itself. Its splits of fixed size are not made for CUDA graphs, so deterministic steps have
    none."""
    return {
        "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
        "logits_soft_cap": spec.soft_cap,
        "sm_scale": spec.scale,
        "q_data_type": setup.dtype,
        "kv_data_type": setup.kv_dtype,
        "non_blocking": True,
        "disable_split_kv": setup.deterministic,
    }


class Decode:
    """One query a row."""

    def __init__(
        self,
        library: Any,
        spec: AttentionSpec,
        setup: AttentionSetup,
        shared: SharedBuffers,
        graph_rows: int | None = None,
        place: str = "decode",
    ) -> None:
        """
        Args:
            graph_rows: number of rows of its graph; None: no graph, for steps with any number of
                rows.
            place: in a layer. Wrappers of one place read the same page tables in a step.
        """
        buffers = None if graph_rows is None else shared.tables(place, graph_rows)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            shared.workspace,
            kv_layout="NHD",
            use_cuda_graph=buffers is not None,
            # The other decode kernel splits keys by the batch.
            use_tensor_cores=setup.deterministic or decode_with_tensor_cores(spec),
            paged_kv_indptr_buffer=buffers and buffers.kv_indptr,
            paged_kv_indices_buffer=buffers and buffers.kv_indices,
            paged_kv_last_page_len_buffer=buffers and buffers.last_page_len,
            backend="fa2",
        )
        if buffers is not None:
            wrapper.reset_workspace_buffer(shared.workspace, shared.plan(place, spec))
        self._wrapper = Staged(wrapper, setup.device)
        self._spec = spec
        self._setup = setup

    def plan(self, table: PageTable) -> None:
        self._wrapper.plan(
            table.kv_indptr,
            table.kv_indices,
            table.last_page_len,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            self._setup.page_size,
            **score_options(self._spec, self._setup),
        )

    def run(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> None:
        """``query`` and ``out`` are [rows, num_heads, head_dim]."""
        self._wrapper.run(query, kv_cache, out)

    def run_with_lse(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> Tensor:
        """Attend, and return the base-2 logarithm of each softmax's sum, [rows, num_heads]
        float32."""
        return self._wrapper.run_with_lse(query, kv_cache, out)


class Prefill:
    """Attention of several queries per row: the last positions of the row, with a causal mask."""

    def __init__(
        self,
        library: Any,
        spec: AttentionSpec,
        setup: AttentionSetup,
        shared: SharedBuffers,
        kernel: PrefillKernel,
    ) -> None:
        self.kernel = kernel
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            shared.workspace, kv_layout="NHD", backend=kernel
        )
        self._wrapper = Staged(wrapper, setup.device)
        self._spec = spec
        self._setup = setup

    def plan(self, table: PageTable) -> None:
        _plan_queries(self._wrapper, table, self._spec, self._setup, causal=True)

    def run(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> None:
        """``query`` and ``out`` are [tokens, num_heads, head_dim]."""
        self._wrapper.run(query, kv_cache, out)

    def run_with_lse(self, query: Tensor, kv_cache: LayerKV, out: Tensor) -> Tensor:
        """Attend, and return the base-2 logarithm of each softmax's sum, [tokens, num_heads]
        float32."""
        return self._wrapper.run_with_lse(query, kv_cache, out)


def _plan_queries(
    wrapper: Staged, table: PageTable, spec: AttentionSpec, setup: AttentionSetup, *, causal: bool
) -> None:
    wrapper.plan(
        table.qo_indptr,
        table.kv_indptr,
        table.kv_indices,
        table.last_page_len,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        setup.page_size,
        causal=causal,
        **score_options(spec, setup),
    )


class Cascade:
    """One query a row, where groups of rows share a prefix (Juravsky et al., 2024; FlashInfer's
    cascade).

    A group's queries see the shared pages as one prefill without a causal mask, so these are read
    once for all of them; each row then sees its own pages, and the two results are merged by their
    softmax sums.
    """

    def __init__(
        self,
        library: Any,
        spec: AttentionSpec,
        setup: AttentionSetup,
        shared: SharedBuffers,
        graph_rows: int | None = None,
    ) -> None:
        """
        Args:
            graph_rows: as of :class:`Decode`. There are :func:`graph_groups` groups then, of which
                some are empty.
        """
        self._library = library
        self._spec = spec
        self._setup = setup
        self._own = Decode(library, spec, setup, shared, graph_rows, place="own")
        self._shared = Staged(self._shared_wrapper(shared, graph_rows), setup.device)
        self._fixed_sharing = None if graph_rows is None else shared.sharing(graph_rows)
        self._sharing: Tensor | None = self._fixed_sharing

    def _shared_wrapper(self, shared: SharedBuffers, graph_rows: int | None) -> Any:
        buffers = None
        if graph_rows is not None:
            buffers = shared.tables("shared", graph_groups(graph_rows))
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            shared.workspace,
            kv_layout="NHD",
            use_cuda_graph=buffers is not None,
            qo_indptr_buf=buffers and buffers.qo_indptr,
            paged_kv_indptr_buf=buffers and buffers.kv_indptr,
            paged_kv_indices_buf=buffers and buffers.kv_indices,
            paged_kv_last_page_len_buf=buffers and buffers.last_page_len,
            backend="fa2",
        )
        if buffers is not None:
            wrapper.reset_workspace_buffer(shared.workspace, shared.plan("shared", self._spec))
        return wrapper

    def plan(self, tables: CascadeTables) -> None:
        self._own.plan(tables.own)
        _plan_queries(self._shared, tables.shared, self._spec, self._setup, causal=False)
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
    wrapper: Decode | Prefill | Cascade,
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
