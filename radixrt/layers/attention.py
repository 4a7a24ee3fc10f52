"""The attention block of a decoder layer: projections, rotation, attention over the paged KV
cache."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.attention.backend import AttentionInputs, AttentionSpec, ForwardContext
from radixrt.attention.kv_spec import KVSpec
from radixrt.layers.hf_config import head_dim
from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.linear import ColumnParallelLinear, Heads, RowParallelLinear
from radixrt.layers.norm import AllHeadsNorm, RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.layers.weights import WeightSlot


class AttentionBlock(nn.Module, ABC):
    """The attention of one layer. It writes the step's tokens into the layer's KV cache and attends
    over it."""

    spec: AttentionSpec

    def kv_spec(self, dtype: torch.dtype) -> KVSpec:
        """The layer's KV cache on this rank: keys and values of one width, unless a family keeps
        something else."""
        return KVSpec.keys_and_values(self.spec.num_kv_heads, self.spec.head_dim, dtype)

    @abstractmethod
    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], positions [num_tokens] -> [num_tokens, hidden_size]"""


class HeadSinks(nn.Module):
    """A score of each head that takes part in the softmax of every query and has no value: a query
    may attend to nothing."""

    def __init__(self, num_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.num_heads = num_heads
        share = tp.share(num_heads, "number of attention heads")
        self.start = tp.rank * share
        scores = torch.zeros(share, dtype=torch.float32)
        self.scores = nn.Parameter(scores, requires_grad=False)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield path, WeightSlot((self.num_heads,), self.scores, 0, self.start)


class SelfAttention(AttentionBlock, KernelLayer):
    """Grouped-query attention of layer ``layer_index``, whose KV cache is the context's at that
    index."""

    def __init__(
        self,
        config: Any,
        layer_index: int,
        rotary: RotaryEmbedding,
        tp: TensorParallel,
        *,
        scale: float | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        query_norm: RMSNorm | AllHeadsNorm | None = None,
        key_norm: RMSNorm | AllHeadsNorm | None = None,
        norm_after_rotation: bool = False,
        rotates: bool = True,
        query_scale: Callable[[Tensor], Tensor] | None = None,
        has_sinks: bool = False,
        gated: bool = False,
        input_size: int | None = None,
    ) -> None:
        """
        Args:
            scale: of the scores; default: that of the head dimension to the power of -0.5.
            query_norm, key_norm: applied before the rotation, to each head (Qwen3, Gemma 3) or to
                all together (OLMo 2).
            norm_after_rotation: they are applied after it (Hunyuan).
            rotates: False: queries and keys have no positions (every fourth layer of SmolLM3).
            query_scale: factors of the rotated queries by position (Ministral 3): [num_tokens] ->
                [num_tokens].
            has_sinks: each head has a learned score beside those of the keys (gpt-oss).
            gated: behind each head of the query, ``q_proj`` computes a gate, by whose sigmoid the
                head's output is multiplied (Qwen3-Next).
            input_size: features that the projections read; None: the hidden size.
        """
        super().__init__()
        self.layer_index = layer_index
        self.rotary = rotary
        size, num_heads, num_kv_heads = (
            head_dim(config),
            config.num_attention_heads,
            config.num_key_value_heads,
        )
        heads = Heads.for_rank(num_heads, num_kv_heads, size, tp)
        self.spec = AttentionSpec(
            num_heads=heads.query,
            num_kv_heads=heads.kv,
            head_dim=size,
            scale=size**-0.5 if scale is None else scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
        )
        self.gated = gated
        self.head_counts = [heads.query * (1 + gated), heads.kv, heads.kv]
        projections = heads.projections(num_heads * (1 + gated), num_kv_heads, tp)
        self.qkv_proj = ColumnParallelLinear(
            input_size or config.hidden_size, projections, qkv_bias
        )
        self.q_norm = query_norm
        self.k_norm = key_norm
        self.norm_after_rotation = norm_after_rotation
        self.rotates = rotates
        self.query_scale = query_scale
        self.sinks = HeadSinks(num_heads, tp) if has_sinks else None
        self.o_proj = RowParallelLinear(num_heads * size, config.hidden_size, output_bias, tp)

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], positions [num_tokens] -> [num_tokens, hidden_size]"""
        merged = self.qkv_proj.forward(hidden)
        heads = merged.view(merged.shape[0], sum(self.head_counts), self.spec.head_dim)
        query, key, value = heads.split_with_sizes(self.head_counts, dim=1)
        gate = None
        if self.gated:
            query, gate = query.unflatten(1, (self.spec.num_heads, 2)).unbind(2)
        if not self.norm_after_rotation:
            query, key = self._norm(query, key)
        if self.rotates:
            query, key = self.rotary.forward(positions, query, key)
        if self.norm_after_rotation:
            query, key = self._norm(query, key)
        if self.query_scale is not None:
            query = query * self.query_scale(positions).to(query.dtype)[:, None, None]
        kv_cache = context.kv_caches[self.layer_index]
        sinks = None if self.sinks is None else self.sinks.scores
        attended = context.backend.attend(
            AttentionInputs(query, key, value, kv_cache, self.spec, sinks)
        )
        if gate is not None:
            attended = self.kernels.sigmoid_gate(gate, attended)
        return self.o_proj.forward(attended.flatten(1))

    def _norm(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query, key
        return self.q_norm(query), self.k_norm(key)
