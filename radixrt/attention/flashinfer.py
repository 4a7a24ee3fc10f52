"""Attention by FlashInfer's kernels (Ye et al., 2025), on a GPU.

Each distinct kind of layer has its wrappers, planned once per step for all layers of the kind:
Gemma's local and global layers are two kinds. Decodes and prefills of a step are planned apart, and
decodes that share prefixes as a cascade where that pays.
"""

import importlib.util
import logging
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixrt.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    AttentionSetup,
    AttentionSpec,
)
from radixrt.attention.flashinfer_latents import AppendLatents, Latents, why_not_latents
from radixrt.attention.flashinfer_wrappers import (
    CASCADE_GRAPH_FROM_ROWS,
    HEAD_DIMS,
    Cascade,
    Decode,
    Prefill,
    PrefillKernel,
    SharedBuffers,
    cascade_pays,
    graph_groups,
    prefill_kernel,
    run_with_sinks,
)
from radixrt.attention.kv_spec import LayerKV, to_kv_dtype
from radixrt.attention.metadata import (
    AttentionMetadata,
    CascadeTables,
    PageTable,
    PrefixGroups,
    StepTables,
)
from radixrt.base.errors import ConfigError
from radixrt.device.device import UntracedFunctions, load_flashinfer


class Append:
    """Writes a step's K and V into the cache.

    The kernel finds a token's page in the page table of its sequence. A step's metadata holds the
    location of each token already, so the kernel gets the page table of one sequence that owns
    every page in order: a token's position in it is its location. That table never changes.
    Locations of padding are on the spare page.
    """

    def __init__(self, shared: SharedBuffers, locations: Tensor | None = None) -> None:
        """
        Args:
            locations: [rows] int32 on the device: where a graph looks for the locations of a step;
                None: anew for each.
        """
        self._functions = UntracedFunctions(shared.library)
        self._shared = shared
        self._fixed_locations = locations
        self._locations = locations
        self._sequence: Tensor | None = None

    def plan(self, metadata: AttentionMetadata) -> None:
        if self._fixed_locations is None:
            self._locations = metadata.kv_locations.to(torch.int32)
        else:
            self._fixed_locations.copy_(metadata.kv_locations)
        assert self._locations is not None
        if self._sequence is None or len(self._sequence) != len(self._locations):
            self._sequence = torch.zeros_like(self._locations)  # all tokens are of the only one

    def run(self, key: Tensor | None, value: Tensor | None, kv_cache: LayerKV) -> None:
        """``key`` and ``value`` are [num_tokens, num_kv_heads, head_dim]; None: an earlier layer
        has written them."""
        if key is None or value is None:
            return
        assert self._locations is not None, "plan() comes before attend()"
        table = self._shared.whole_cache(kv_cache[0].shape[0])
        self._functions.append_paged_kv_cache(
            to_kv_dtype(key, kv_cache[0].dtype),
            to_kv_dtype(value, kv_cache[1].dtype),
            self._sequence,
            self._locations,
            kv_cache,
            table.kv_indices,
            table.kv_indptr,
            table.last_page_len,
            kv_layout="NHD",
        )


log = logging.getLogger(__name__)


def why_not(setup: AttentionSetup) -> str | None:
    """The reason for which FlashInfer cannot serve this model here; None: it can."""
    if setup.device.torch_device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package is not installed: pip install 'radixrt[cuda]'"
    if setup.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, not in {_name(setup.dtype)}: set --dtype"
    if setup.kv_dtype == torch.int8:
        return "it reads no KV cache of int8; use --kv-cache-dtype auto or fp8_e4m3"
    if _reads_latents(setup):
        return why_not_latents(setup)
    for dim in sorted({spec.head_dim for spec in setup.specs} - set(HEAD_DIMS)):
        return f"it has no kernels for heads of {dim}, only of {', '.join(map(str, HEAD_DIMS))}"
    return setup.why_not_plain()


def _reads_latents(setup: AttentionSetup) -> bool:
    return any(kept.is_latent for kept in setup.kv_specs)


def lacks_kernels(error: BaseException) -> ConfigError | None:
    """The error to raise where ``error`` comes from FlashInfer's search for a kernel or its
    compiling; None: it doesn't."""
    frames = traceback.walk_tb(error.__traceback__)
    if not any(f.f_globals.get("__name__", "").startswith("flashinfer.jit") for f, _ in frames):
        return None
    return ConfigError(
        "FlashInfer has no compiled kernel for this model and could not make one: install nvcc (the CUDA toolkit) and ninja, "
        "compile it ahead (docs/gpu.md), or use --attention-backend torch_reference, which is slow. "
        f"({' '.join(str(error).split())[:500]})"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FlashInferBackend(AttentionBackend):
    """Instances for captured graphs come from :meth:`for_graph`."""

    def __init__(self, setup: AttentionSetup, library: Any) -> None:
        self._setup = setup
        self._shared = SharedBuffers(setup, library)
        self._prefill_kernels = PrefillKernels(library, setup)
        self._append: Append | AppendLatents
        layers: type[_Layers | _LatentLayers]
        if _reads_latents(setup):
            self._append, layers = AppendLatents(), _LatentLayers
        else:
            self._append, layers = Append(self._shared), _Layers
        self._layers = {
            spec: layers(spec, self._shared, self._prefill_kernels) for spec in set(setup.specs)
        }

    def plan(self, metadata: AttentionMetadata) -> None:
        self._append.plan(metadata)
        step = _Step.from_metadata(metadata, self._setup)
        for layers in self._layers.values():
            layers.plan(step)

    def attend(self, step: AttentionInputs) -> Tensor:
        self._append.run(step.key, step.value, step.kv_cache)
        return self._layers[step.spec].run(step)

    # ------------------------------------------------------------ graphs

    def graph_kinds(self, rows: int) -> Sequence[str]:
        """The kinds of graphs for decode steps of ``rows`` rows; the first serves any step."""
        cascades = self._setup.cascade and rows >= CASCADE_GRAPH_FROM_ROWS
        if _reads_latents(self._setup):
            return ("plain",)
        if cascades and any(_may_cascade(spec) for spec in self._layers):
            return ("plain", "cascade")
        return ("plain",)

    def reserve_for_graphs(self) -> None:
        """Allocate what the graphs of all sizes share, which otherwise the first of them would."""
        cascades = "cascade" in self.graph_kinds(self._setup.max_rows)
        self._shared.reserve(["decode", "own", "shared"] if cascades else ["decode"])

    def graph_kind(self, metadata: AttentionMetadata) -> str:
        """The kind of graph that computes this step fastest."""
        rows = len(metadata.last_page_len_cpu)
        if metadata.shared_prefixes is None or "cascade" not in self.graph_kinds(rows):
            return "plain"
        groups = metadata.shared_prefixes.first(rows).at_most(graph_groups(rows))
        pays = any(_pays(groups, spec, self._setup) for spec in self._layers)
        return "cascade" if pays else "plain"

    def for_graph(self, rows: int, kind: str) -> AttentionBackend:
        """A backend for decode steps of exactly ``rows`` rows, whose ``attend`` may be captured:
        each ``plan`` changes in place the tables that a replay reads."""
        return _GraphBackend(self._shared, rows, kind, self._prefill_kernels)


def _may_cascade(spec: AttentionSpec) -> bool:
    """A window moves with its query, so rows of a group would not see the same."""
    return spec.sliding_window is None


def _pays(groups: PrefixGroups, spec: AttentionSpec, setup: AttentionSetup) -> bool:
    tokens = groups.num_pages * setup.page_size
    kv_bytes = setup.kv_dtype.itemsize
    return (
        groups.share and _may_cascade(spec) and cascade_pays(groups.sizes(), tokens, spec, kv_bytes)
    )


class _Step:
    """A step's page tables; those of a cascade are made when a layer wants them first."""

    def __init__(self, tables: StepTables, groups: PrefixGroups, setup: AttentionSetup) -> None:
        self.decodes = tables.decodes
        self.prefills = tables.prefills
        self.groups = groups
        self._setup = setup
        self._cascade: CascadeTables | None = None

    @staticmethod
    def from_metadata(metadata: AttentionMetadata, setup: AttentionSetup) -> "_Step":
        tables = StepTables.from_metadata(metadata, setup.device)
        groups = PrefixGroups.none(tables.num_decodes)
        if setup.cascade and metadata.shared_prefixes is not None:
            groups = metadata.shared_prefixes.first(tables.num_decodes)
        return _Step(tables, groups, setup)

    def cascade(self) -> CascadeTables:
        if self._cascade is None:
            assert self.decodes is not None
            self._cascade = CascadeTables.for_groups(
                self.decodes, self.groups, self._setup.page_size, self._setup.device
            )
        return self._cascade


class PrefillKernels:
    """Selects the prefill kernel of a step: the user's setting, else a rule among the kernels that
    work here."""

    def __init__(self, library: Any, setup: AttentionSetup) -> None:
        """
        Raises:
            ConfigError: FA3 is asked for and can't run here.
        """
        # FA3 is for Hopper, and wants queries of the cache's type.
        self._has_fa3 = setup.dtype == setup.kv_dtype and library.utils.is_sm90a_supported(
            setup.device.torch_device
        )
        self._asked = setup.prefill_kernel
        if self._asked == "fa3" and not self._has_fa3:
            raise ConfigError(
                "--prefill-kernel fa3 needs a Hopper GPU (H100, H200) and a KV cache of the activations' type: leave it out."
            )

    def choose(self, table: PageTable, spec: AttentionSpec) -> PrefillKernel:
        """The kernel for the prefills of a step."""
        if self._asked != "auto":
            return self._asked
        return prefill_kernel(table.query_lengths(), spec.num_heads) if self._has_fa3 else "fa2"

    def choose_for_latents(self) -> PrefillKernel:
        """The kernel for latents, of which both split keys."""
        if self._asked != "auto":
            return self._asked
        return "fa3" if self._has_fa3 else "fa2"

    def give_up(self, kernel: PrefillKernel, error: Exception) -> None:
        """``kernel`` has failed: use the other one from now on, and say so once.

        Raises:
            Exception: ``error`` itself, where there is no other one, or the user wants this one.
        """
        if kernel == "fa2" or self._asked == "fa3" or isinstance(error, torch.OutOfMemoryError):
            raise error
        if self._has_fa3:
            self._has_fa3 = False
            log.warning(
                "FlashInfer's FA3 kernel is not used, FA2 computes all prompts: %s (--prefill-kernel fa2 asks for that; a "
                "missing kernel can be compiled ahead, docs/gpu.md.)",
                " ".join(str(error).split())[:500],
            )


class _Layers:
    """The wrappers of all layers of one kind, made when they are needed first."""

    def __init__(
        self, spec: AttentionSpec, shared: SharedBuffers, prefill_kernels: PrefillKernels
    ) -> None:
        self._spec = spec
        self._shared = shared
        self._prefill_kernels = prefill_kernels
        self._decode = Decode(shared, spec)
        self._cascade: Cascade | None = None
        self._prefills: dict[PrefillKernel, Prefill] = {}
        self._decodes_by: Decode | Cascade = self._decode
        self._prefills_by: Prefill | None = None
        self._prefill_table: PageTable | None = None
        self._num_decodes = 0

    def plan(self, step: _Step) -> None:
        self._num_decodes = 0
        if step.decodes is not None:
            self._num_decodes = step.decodes.num_rows
            self._plan_decodes(step, step.decodes)
        self._prefills_by, self._prefill_table = None, step.prefills
        if step.prefills is not None:
            self._plan_prefills(step.prefills)

    def _plan_decodes(self, step: _Step, decodes: PageTable) -> None:
        if _pays(step.groups, self._spec, self._shared.setup):
            if self._cascade is None:
                self._cascade = Cascade(self._shared, self._spec)
            self._cascade.plan(step.cascade())
            self._decodes_by = self._cascade
        else:
            self._decode.plan(decodes)
            self._decodes_by = self._decode

    def _plan_prefills(self, table: PageTable) -> None:
        """Plan with the kernel of choice, or with the other one if that is missing or fails."""
        kernel = self._prefill_kernels.choose(table, self._spec)
        try:
            self._prefills_by = self._prefill(kernel)
            self._prefills_by.plan(table)
        except Exception as error:
            self._prefill_kernels.give_up(kernel, error)
            self._plan_prefills(table)

    def _prefill(self, kernel: PrefillKernel) -> Prefill:
        if kernel not in self._prefills:
            self._prefills[kernel] = Prefill(self._shared, self._spec, kernel)
        return self._prefills[kernel]

    def run(self, step: AttentionInputs) -> Tensor:
        """The result of a layer: [num_tokens, num_heads, v_head_dim]"""
        query, kv_cache, sinks, out = step.query, step.kv_cache, step.sinks, step.new_output()
        decodes = self._num_decodes
        if decodes:
            run_with_sinks(self._decodes_by, query[:decodes], kv_cache, out[:decodes], sinks)
        if self._prefills_by is not None:
            self._run_prefills(query[decodes:], kv_cache, out[decodes:], sinks)
        return out

    def _run_prefills(
        self, query: Tensor, kv_cache: LayerKV, out: Tensor, sinks: Tensor | None
    ) -> None:
        prefills = self._prefills_by
        assert prefills is not None and self._prefill_table is not None
        try:
            run_with_sinks(prefills, query, kv_cache, out, sinks)
        except Exception as error:
            self._prefill_kernels.give_up(prefills.kernel, error)
            self._plan_prefills(self._prefill_table)
            self._run_prefills(query, kv_cache, out, sinks)


class _LatentLayers:
    """As :class:`_Layers`, of layers that keep latents."""

    def __init__(
        self, spec: AttentionSpec, shared: SharedBuffers, prefill_kernels: PrefillKernels
    ) -> None:
        self._spec = spec
        self._shared = shared
        self._kernels = prefill_kernels
        self._wrappers: dict[tuple[str, PrefillKernel], Latents] = {}
        self._planned: list[tuple[Latents, int]] = []
        """Wrappers in the order of the rows, and how many tokens each attends for."""

    def plan(self, step: _Step) -> None:
        self._planned = [
            (self._plan(place, table), int(table.qo_indptr[-1]))
            for place, table in (("decodes", step.decodes), ("prefills", step.prefills))
            if table is not None
        ]

    def _plan(self, place: str, table: PageTable) -> Latents:
        """Plan with the kernel of choice, or with the other one if that is missing or fails."""
        kernel = self._kernels.choose_for_latents()
        try:
            if (place, kernel) not in self._wrappers:
                self._wrappers[place, kernel] = Latents(self._shared, self._spec, kernel)
            self._wrappers[place, kernel].plan(table)
        except Exception as error:
            self._kernels.give_up(kernel, error)
            return self._plan(place, table)
        return self._wrappers[place, kernel]

    def run(self, step: AttentionInputs) -> Tensor:
        """The result of a layer: [num_tokens, num_heads, latent_dim]"""
        out, first = step.new_output(), 0
        for wrapper, count in self._planned:
            rows = slice(first, first + count)
            first += count
            wrapper.run(step.query[rows], step.kv_cache, out[rows])
        return out


class _GraphBackend(AttentionBackend):
    """Decode steps of a fixed number of rows; all that changes lies in buffers whose places are
    fixed."""

    def __init__(
        self, shared: SharedBuffers, rows: int, kind: str, prefill_kernels: PrefillKernels
    ) -> None:
        self._setup = shared.setup
        self._rows = rows
        self._append: Append | AppendLatents = Append(shared, shared.locations(rows))
        self._decodes: dict[AttentionSpec, Decode | Cascade | Latents] = {}
        if _reads_latents(shared.setup):
            self._append = AppendLatents(shared.locations(rows))
            kernel = prefill_kernels.choose_for_latents()
            self._decodes = {
                spec: Latents(shared, spec, kernel, rows) for spec in set(shared.setup.specs)
            }
            return
        for spec in set(shared.setup.specs):
            cascades = kind == "cascade" and _may_cascade(spec)
            self._decodes[spec] = (Cascade if cascades else Decode)(shared, spec, rows)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._append.plan(metadata)
        step = _Step.from_metadata(metadata, self._setup)
        assert step.decodes is not None and step.prefills is None, "graphs hold decode steps"
        step.groups = step.groups.at_most(graph_groups(self._rows))
        for decode in self._decodes.values():
            if isinstance(decode, Cascade):
                decode.plan(step.cascade())
            else:
                decode.plan(step.decodes)

    def attend(self, step: AttentionInputs) -> Tensor:
        self._append.run(step.key, step.value, step.kv_cache)
        out, decode = step.new_output(), self._decodes[step.spec]
        if isinstance(decode, Latents):
            decode.run(step.query, step.kv_cache, out)
        else:
            run_with_sinks(decode, step.query, step.kv_cache, out, step.sinks)
        return out


def make_flashinfer(setup: AttentionSetup) -> FlashInferBackend:
    """
    Raises:
        ConfigError: it can't serve this model here.
    """
    reason = why_not(setup)
    if reason is not None:
        raise ConfigError(f"--attention-backend flashinfer can't be used: {reason}.")
    return FlashInferBackend(setup, load_flashinfer())
