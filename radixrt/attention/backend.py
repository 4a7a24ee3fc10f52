"""The interface between a model's attention layers and the kernels that compute attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from radixrt.attention.kv_spec import LayerKV
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.states import StateTables


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


class AttentionBackend(Protocol):
    """Computes attention for all layers of one worker; a worker has one instance."""

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare for one step; called once before the layers run. Host work only."""

    def attend(self, step: AttentionInputs) -> Tensor:
        """Write the step's keys and values into the cache, then attend over it.

        Returns:
            [num_tokens, num_heads, v_head_dim]
        """


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend that can be part of a captured graph."""

    def graph_kinds(self, rows: int) -> Sequence[str]:
        """The kinds of graphs for decode steps of ``rows`` rows; the first serves any step."""

    def reserve_for_graphs(self) -> None:
        """Allocate what the graphs of all sizes share, which otherwise the first of them would."""

    def graph_kind(self, metadata: AttentionMetadata) -> str:
        """The kind of graph that computes this step fastest."""

    def for_graph(self, rows: int, kind: str) -> AttentionBackend:
        """A backend for decode steps of exactly ``rows`` rows, whose ``attend`` may be captured:
        each ``plan`` changes in place the tables that a replay reads."""


@runtime_checkable
class NarrowingBackend(AttentionBackend, Protocol):
    """A backend that can attend for some rows of a step."""

    def for_rows(self, rows: Tensor) -> AttentionBackend | None:
        """A backend that is planned for these rows [n] int64 of the step alone, for layers that
        write nothing into a cache; None: it computes no such selection."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The inputs of a model's layers beside the hidden states. Passed as an argument, never
    global."""

    backend: AttentionBackend
    kv_caches: list[LayerKV]
    """One a layer; empty for a layer that reads an earlier one's, or keeps a state instead."""
    states: StateTables | None = None
    """The states of recurrent layers; None: the model has none."""

    def narrowed(self, rows: Tensor) -> "ForwardContext | None":
        """The context of these rows of the step alone, see ``NarrowingBackend``; None: the backend
        needs all of them."""
        if not isinstance(self.backend, NarrowingBackend):
            return None
        backend = self.backend.for_rows(rows)
        return None if backend is None else replace(self, backend=backend)
