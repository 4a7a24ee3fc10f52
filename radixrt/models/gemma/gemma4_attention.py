"""The attention of Gemma 4: heads of a size by layer, layers whose values are their keys, and
layers that read an earlier layer's KV cache."""

from typing import Any

import torch
from torch import Tensor

from radixrt.attention.backend import AttentionInputs, AttentionSpec, ForwardContext
from radixrt.attention.kv_spec import KVSpec
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.hf_config import sliding_window
from radixrt.layers.linear import ColumnParallelLinear, Heads, RowParallelLinear
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding


def kv_layer(config: Any, index: int) -> int:
    """The layer whose KV cache layer ``index`` reads: its own, or that of the last layer of its
    type that has one."""
    first_sharing = config.num_hidden_layers - config.num_kv_shared_layers
    kinds = config.layer_types
    of_kind = (i for i in range(first_sharing) if kinds[i] == kinds[index])
    return index if index < first_sharing else max(of_kind)


class Gemma4Attention(AttentionBlock):
    """Scores have no factor: the norms of query and key keep them in range. Values are normed too,
    without a weight.

    Where values are keys (``attention_k_eq_v``, in layers without a window), one projection gives
    both. They differ by their norms and the rotation, so both are cached.
    """

    def __init__(
        self, config: Any, index: int, rotary: RotaryEmbedding, tp: TensorParallel
    ) -> None:
        """
        Args:
            config: transformers' of the text model, with the sizes of each layer.
        """
        super().__init__()
        self.rotary = rotary
        self.kv_layer = kv_layer(config, index)
        self.owns_kv = self.kv_layer == index
        own = config.per_layer_config[index]
        size, eps = own.head_dim, config.rms_norm_eps
        heads = Heads.for_rank(own.num_attention_heads, own.num_key_value_heads, size, tp)
        window = sliding_window(config, index)
        self.spec = AttentionSpec(heads.query, heads.kv, size, scale=1.0, sliding_window=window)
        query, key, value = heads.projections(own.num_attention_heads, own.num_key_value_heads, tp)
        values_are_keys = config.attention_k_eq_v and window is None
        kept = [key] if values_are_keys else [key, value]
        bias = config.attention_bias
        self.qkv_proj = ColumnParallelLinear(
            config.hidden_size, [query, *(kept if self.owns_kv else ())], bias
        )
        self.q_norm = RMSNorm(size, eps)
        if self.owns_kv:
            self.k_norm = RMSNorm(size, eps)
            self.v_norm = RMSNorm(size, eps, learned=False)
        self.o_proj = RowParallelLinear(
            own.num_attention_heads * size, config.hidden_size, bias, tp
        )

    def kv_spec(self, dtype: torch.dtype) -> KVSpec:
        return super().kv_spec(dtype) if self.owns_kv else KVSpec(())

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        merged = self.qkv_proj.forward(hidden)
        heads = merged.view(merged.shape[0], -1, self.spec.head_dim)
        query = self.q_norm.forward(heads[:, : self.spec.num_heads])
        key = value = None
        if self.owns_kv:
            kept = heads[:, self.spec.num_heads :]
            key = self.k_norm.forward(kept[:, : self.spec.num_kv_heads])
            value = self.v_norm.forward(kept[:, -self.spec.num_kv_heads :])
            query, key = self.rotary.forward(positions, query, key)
        else:
            query, _ = self.rotary.forward(positions, query, query[:, :0])
        kv_cache = context.kv_caches[self.kv_layer]
        attended = context.backend.attend(AttentionInputs(query, key, value, kv_cache, self.spec))
        return self.o_proj.forward(attended.flatten(1))
