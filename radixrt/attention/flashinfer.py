"""Attention by FlashInfer's kernels (Ye et al., 2025), on a GPU.

Each distinct kind of layer has its wrappers, planned once a step for all layers of the kind: Gemma's local and global
layers are two kinds. Wrappers share one workspace, since what they write there lives no longer than one of their runs.
"""

import importlib.util
from types import ModuleType
from typing import Any

import torch

from radixrt.attention.backend import AttentionBackend, AttentionSpec
from radixrt.attention.flashinfer_rules import (
    HEAD_DIMS,
    PrefillKernel,
    decode_with_tensor_cores,
    prefill_kernel,
)
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.page_tables import PageTable, StepTables
from radixrt.attention.setup import AttentionSetup
from radixrt.device import Device, Mark
from radixrt.errors import ConfigError

WORKSPACE_BYTES = 128 << 20
"""For the partial results of rows whose keys are split; what FlashInfer advises."""
PLAN_BYTES = 8 << 20
"""For what a plan tells the kernels; FlashInfer's own size."""

FP8_MAX = 448.0
"""Largest number of float8_e4m3fn; torch turns what is larger into NaN."""


def why_not(setup: AttentionSetup) -> str | None:
    """Why FlashInfer can't serve this model here; None: it can."""
    if setup.device.torch_device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package is not installed: pip install 'radixrt[cuda]'"
    if setup.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {_name(setup.dtype)}: set --dtype"
    for dim in sorted({spec.head_dim for spec in setup.specs} - set(HEAD_DIMS)):
        return f"it has no kernels for heads of {dim}, only of {', '.join(map(str, HEAD_DIMS))}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FlashInferBackend:
    """See ``AttentionBackend``. Instances for graphs come from :meth:`for_graph`."""

    def __init__(self, setup: AttentionSetup, library: ModuleType | Any) -> None:
        """
        Args:
            setup: what it is made for.
            library: the package ``flashinfer``.
        """
        self._setup = setup
        self._library = library
        self._append = _Append(library, setup)
        self._shared = _SharedBuffers(setup)
        self._layers = {
            spec: _Layers(library, spec, setup, self._shared) for spec in set(setup.specs)
        }

    def plan(self, metadata: AttentionMetadata) -> None:
        self._append.plan(metadata)
        tables = StepTables.of(metadata, self._setup.device)
        for layers in self._layers.values():
            layers.plan(tables)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        self._append.run(key, value, key_cache, value_cache)
        return self._layers[spec].run(query, (key_cache, value_cache))

    def for_graph(self, rows: int) -> AttentionBackend:
        """See ``CapturableBackend.for_graph``."""
        return _GraphBackend(self._setup, self._library, self._shared, rows)


class _GraphBackend:
    """Decode steps of a fixed number of rows; all that changes lies in buffers whose places are fixed."""

    def __init__(
        self, setup: AttentionSetup, library: Any, shared: "_SharedBuffers", rows: int
    ) -> None:
        self._setup = setup
        self._append = _Append(library, setup, shared.slots(rows))
        self._decodes = {
            spec: _Decode(library, spec, setup, shared, shared.decode_buffers(rows))
            for spec in set(setup.specs)
        }

    def plan(self, metadata: AttentionMetadata) -> None:
        self._append.plan(metadata)
        tables = StepTables.of(metadata, self._setup.device)
        assert tables.decodes is not None and tables.prefills is None, "graphs hold decode steps"
        for decode in self._decodes.values():
            decode.plan(tables.decodes)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """See ``AttentionBackend.attend``."""
        self._append.run(key, value, key_cache, value_cache)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._decodes[spec].run(query, (key_cache, value_cache), out)
        return out


# ---------------------------------------------------------------- writing


class _Append:
    """Writes a step's K and V into the cache.

    The kernel finds a token's page by the page table of its sequence. A step's metadata says already which slot of the
    cache each token gets, so the kernel is given one sequence that owns every page in order, in which
    a token's position is its slot. That table never changes, and padding needs no care: its slots are on the spare page.
    """

    def __init__(
        self, library: Any, setup: AttentionSetup, slots: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            slots: [rows] int32 on the device: where to keep the slots of a step; None: anew for each.
        """
        self._library = library
        self._setup = setup
        self._slots = slots
        self._fixed = slots is not None
        self._table: _WholeCache | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        if self._fixed:
            assert self._slots is not None
            self._slots.copy_(metadata.kv_slots)
        else:
            self._slots = metadata.kv_slots.to(torch.int32)

    def run(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
    ) -> None:
        """``key`` and ``value`` are [num_tokens, num_kv_heads, head_dim]; for the caches see ``AttentionBackend``."""
        assert self._slots is not None, "plan() comes before attend()"
        if self._table is None or len(self._table.kv_indices) < len(key_cache):
            self._table = _WholeCache(len(key_cache), self._setup.page_size, key.device)
        table = self._table
        self._library.append_paged_kv_cache(
            to_kv_dtype(key, key_cache.dtype),
            to_kv_dtype(value, value_cache.dtype),
            torch.zeros_like(self._slots),
            self._slots,
            (key_cache, value_cache),
            table.kv_indices,
            table.kv_indptr,
            table.last_page_len,
            kv_layout="NHD",
        )


class _WholeCache:
    """The page table of one sequence that owns all pages, in their order."""

    def __init__(self, num_pages: int, page_size: int, place: torch.device) -> None:
        self.kv_indices = torch.arange(num_pages, dtype=torch.int32, device=place)
        self.kv_indptr = torch.arange(2, dtype=torch.int32, device=place) * num_pages
        self.last_page_len = torch.full((1,), page_size, dtype=torch.int32, device=place)


def to_kv_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as the cache holds them."""
    if dtype == torch.float8_e4m3fn:
        tensor = tensor.clamp(-FP8_MAX, FP8_MAX)
    return tensor.to(dtype)


# ---------------------------------------------------------------- reading


class _SharedBuffers:
    """Memory that all wrappers of a worker use, one after the other."""

    def __init__(self, setup: AttentionSetup) -> None:
        self._setup = setup
        self._place = setup.device.torch_device
        self.workspace = self._bytes(WORKSPACE_BYTES)
        self._graph_plan: torch.Tensor | None = None
        self._graph_slots: torch.Tensor | None = None
        self._graph_tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self._place)

    def _ints(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self._place)

    def graph_plan(self) -> torch.Tensor:
        """What a graph's plan tells its kernels. A plan belongs to the replay after it, so one place is enough."""
        if self._graph_plan is None:
            self._graph_plan = self._bytes(PLAN_BYTES)
        return self._graph_plan

    def slots(self, rows: int) -> torch.Tensor:
        """[rows] int32"""
        if self._graph_slots is None:
            self._graph_slots = self._ints(self._setup.max_rows)
        return self._graph_slots[:rows]

    def decode_buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page table of a graph: indptr [rows + 1], indices [as many as there may be] and last page lengths [rows]."""
        if self._graph_tables is None:
            most = self._setup.max_rows
            pages = most * self._setup.max_pages
            self._graph_tables = self._ints(most + 1), self._ints(pages), self._ints(most)
        indptr, indices, last_page_len = self._graph_tables
        return indptr[: rows + 1], indices, last_page_len[:rows]


class _Staged:
    """A wrapper whose plan is not made anew before the device has read the last one.

    A plan lies in one pinned buffer of the wrapper until its copy's turn comes. By then the host may be a step ahead; it
    would plan over what is still to be read. The wait is short: the copy goes before the step's kernels.
    """

    def __init__(self, wrapper: Any, device: Device) -> None:
        self._wrapper = wrapper
        self._device = device
        self._read: Mark | None = None

    def plan(self, *arguments: Any, **options: Any) -> None:
        if self._read is not None:
            self._read.wait()
        self._wrapper.plan(*arguments, **options)
        self._read = self._device.mark()

    def run(self, query: torch.Tensor, kv_cache: Any, **options: Any) -> Any:
        return self._wrapper.run(query, kv_cache, **options)


class _Decode:
    """One query a row."""

    def __init__(
        self,
        library: Any,
        spec: AttentionSpec,
        setup: AttentionSetup,
        shared: _SharedBuffers,
        graph: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """
        Args:
            graph: where the page tables lie (:meth:`_SharedBuffers.decode_buffers`); None: anywhere, for steps of any
                number of rows.
        """
        indptr, indices, last_page_len = graph or (None, None, None)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            shared.workspace,
            kv_layout="NHD",
            use_cuda_graph=graph is not None,
            use_tensor_cores=decode_with_tensor_cores(spec),
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
            backend="fa2",
        )
        if graph is not None:
            wrapper.reset_workspace_buffer(shared.workspace, shared.graph_plan())
        self._wrapper = _Staged(wrapper, setup.device)
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
            **_score_options(self._spec, self._setup),
        )

    def run(self, query: torch.Tensor, kv_cache: Any, out: torch.Tensor) -> None:
        self._wrapper.run(query, kv_cache, out=out)


class _Prefill:
    """Several queries a row: the last of its positions, each of which sees what is before it."""

    def __init__(
        self,
        library: Any,
        spec: AttentionSpec,
        setup: AttentionSetup,
        shared: _SharedBuffers,
        kernel: PrefillKernel,
    ) -> None:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
            shared.workspace, kv_layout="NHD", backend=kernel
        )
        self._wrapper = _Staged(wrapper, setup.device)
        self._spec = spec
        self._setup = setup

    def plan(self, table: PageTable) -> None:
        self._wrapper.plan(
            table.qo_indptr,
            table.kv_indptr,
            table.kv_indices,
            table.last_page_len,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            self._setup.page_size,
            causal=True,
            **_score_options(self._spec, self._setup),
        )

    def run(self, query: torch.Tensor, kv_cache: Any, out: torch.Tensor) -> None:
        self._wrapper.run(query, kv_cache, out=out)


def _score_options(spec: AttentionSpec, setup: AttentionSetup) -> dict[str, Any]:
    """What every plan says of scores and types. FlashInfer's window doesn't count the query itself."""
    return {
        "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
        "logits_soft_cap": spec.soft_cap,
        "sm_scale": spec.scale,
        "q_data_type": setup.dtype,
        "kv_data_type": setup.kv_dtype,
        "non_blocking": True,
    }


class _Layers:
    """The wrappers of all layers of one kind, made when they are needed first."""

    def __init__(
        self, library: Any, spec: AttentionSpec, setup: AttentionSetup, shared: _SharedBuffers
    ) -> None:
        self._library = library
        self._spec = spec
        self._setup = setup
        self._shared = shared
        self._decode = _Decode(library, spec, setup, shared)
        self._prefills: dict[PrefillKernel, _Prefill] = {}
        self._prefill: _Prefill | None = None
        """The one that computes this step's prefills."""
        self._tables = StepTables(None, None)

    def plan(self, tables: StepTables) -> None:
        self._tables = tables
        if tables.decodes is not None:
            self._decode.plan(tables.decodes)
        if tables.prefills is not None:
            self._prefill = self._prefill_for(tables.prefills)
            self._prefill.plan(tables.prefills)

    def _prefill_for(self, table: PageTable) -> _Prefill:
        kernel: PrefillKernel = "fa2"
        if self._has_fa3():
            kernel = prefill_kernel(table.query_lengths(), self._spec.num_heads)
        if kernel not in self._prefills:
            self._prefills[kernel] = _Prefill(
                self._library, self._spec, self._setup, self._shared, kernel
            )
        return self._prefills[kernel]

    def _has_fa3(self) -> bool:
        """FA3 is for Hopper, and wants queries of the cache's type."""
        same = self._setup.dtype == self._setup.kv_dtype
        return same and self._library.utils.is_sm90a_supported(self._setup.device.torch_device)

    def run(self, query: torch.Tensor, kv_cache: Any) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim] -> as query"""
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        decodes = self._tables.num_decodes
        if decodes:
            self._decode.run(query[:decodes], kv_cache, out[:decodes])
        if self._tables.prefills is not None:
            assert self._prefill is not None
            self._prefill.run(query[decodes:], kv_cache, out[decodes:])
        return out


def make_flashinfer(setup: AttentionSetup) -> FlashInferBackend:
    """
    Raises:
        ConfigError: it can't serve this model here.
    """
    reason = why_not(setup)
    if reason is not None:
        raise ConfigError(f"--attention-backend flashinfer can't be used: {reason}.")
    import flashinfer  # takes seconds, and makes a folder

    return FlashInferBackend(setup, flashinfer)
