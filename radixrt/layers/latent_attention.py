"""Multi-head latent attention (DeepSeek-V2, 2024): one latent a token in the place of the keys and
values of all heads.

The projection of the latent to keys and values is absorbed into queries and results, in prefill as
in decode: every head attends over the latents themselves. So a cached prefix gives the bits of a
computed one, however a prompt is cut into steps.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from radixrt.attention.backend import AttentionInputs, AttentionSpec, ForwardContext
from radixrt.attention.kv_spec import KVSpec
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.kernels.interface import KernelLayer, LayerKernels
from radixrt.layers.linear import ColumnParallelLinear, LinearLayer, Projection, RowParallelLinear
from radixrt.layers.lora import LoraStack
from radixrt.layers.matrix import DecodableMatrix, DenseMatrix, HeadMatrices, Placement
from radixrt.layers.norm import RMSNorm
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding

LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, in every checkpoint; the config's is that of the layers."""


def score_scale(config: Any) -> float:
    """The factor of the scores. Where YaRN has ``mscale_all_dim``, the square of its factor is a
    part of it (Peng et al., 2023; DeepSeek-V2)."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default" and (all_dim := rope.get("mscale_all_dim")):
        scale *= (1.0 + 0.1 * all_dim * math.log(max(rope["factor"], 1.0))) ** 2
    return scale


class LatentAttention(AttentionBlock, KernelLayer):
    """Latent attention of layer ``layer_index``. The heads are split over ranks; each rank keeps
    the latents whole."""

    def __init__(
        self, config: Any, layer_index: int, rotary: RotaryEmbedding, tp: TensorParallel
    ) -> None:
        """
        Args:
            config: transformers' of the text model, with ``kv_lora_rank``. Without ``q_lora_rank``,
                queries are projected at once.
        """
        super().__init__()
        self.layer_index = layer_index
        self.rotary = rotary
        hidden, latent, bias = config.hidden_size, config.kv_lora_rank, config.attention_bias
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent = latent
        heads = tp.share(config.num_attention_heads, "number of attention heads")
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=1, head_dim=latent + self.rope, scale=score_scale(config)
        )
        queries = Projection.even(
            "q_b_proj" if config.q_lora_rank else "q_proj",
            config.num_attention_heads * (self.nope + self.rope),
            tp,
        )
        self.q_rank = config.q_lora_rank or 0
        down = [Projection.whole("kv_a_proj_with_mqa", latent + self.rope)]
        if self.q_rank:
            down.insert(0, Projection.whole("q_a_proj", self.q_rank))
            self.q_a_layernorm = RMSNorm(self.q_rank, LATENT_NORM_EPS)
        self.down_proj = ColumnParallelLinear(hidden, down, bias)
        self.query_proj = ColumnParallelLinear(self.q_rank or hidden, [queries], False)
        self.kv_a_layernorm = RMSNorm(latent, LATENT_NORM_EPS)
        self.kv_b_proj = UpProjections(
            latent, config.num_attention_heads, self.nope, config.v_head_dim, tp
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.v_head_dim, hidden, bias, tp
        )

    def kv_spec(self, dtype: torch.dtype) -> KVSpec:
        return KVSpec.latents(self.latent, self.rope, dtype)

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], positions [num_tokens] -> [num_tokens, hidden_size]"""
        merged = self.down_proj.forward(hidden)
        key = merged[:, self.q_rank :].unsqueeze(1)  # [num_tokens, 1, latent + rope]
        source = self.q_a_layernorm.forward(merged[:, : self.q_rank]) if self.q_rank else hidden
        query = self.query_proj.forward(source).view(-1, self.spec.num_heads, self.nope + self.rope)
        rotated, rotated_key = self.rotary.forward(
            positions, query[..., self.nope :], key[..., self.latent :]
        )
        latent = self.kv_a_layernorm.forward(key[..., : self.latent])
        key = torch.cat([latent, rotated_key], dim=-1)
        absorbed = query.new_empty(*query.shape[:2], self.spec.head_dim)
        self.kv_b_proj.absorb(query[..., : self.nope], absorbed[..., : self.latent])
        absorbed[..., self.latent :] = rotated
        attended = context.backend.attend(
            AttentionInputs(
                absorbed,
                key,
                key[..., : self.latent],
                context.kv_caches[self.layer_index],
                self.spec,
            )
        )
        return self.o_proj.forward(self.kv_b_proj.results(attended).flatten(1))


class UpProjections(LinearLayer):
    """The projections of a latent to each head's key and value, used the other way round: queries
    times ``keys`` are compared with latents, and weighted latents times ``values`` are results.

    Their weights are kept in the model's dtype, also where the checkpoint quantizes them.
    """

    keys: HeadMatrices
    values: HeadMatrices
    key_lora: LoraStack | None = None
    """The adapters of ``keys``, whose members are the heads; None: there are none."""
    value_lora: LoraStack | None = None
    """The adapters of ``values``, likewise."""

    def __init__(
        self, latent: int, num_heads: int, key_dim: int, value_dim: int, tp: TensorParallel
    ) -> None:
        """
        Args:
            num_heads: of the whole model.
            key_dim: features of a head's key, without its rotated ones.
        """
        heads = tp.share(num_heads, "number of attention heads")
        super().__init__(heads * (key_dim + value_dim), latent, bias=False)
        self.heads, self.num_heads, self.rank = heads, num_heads, tp.rank
        self.key_dim, self.value_dim = key_dim, value_dim

    def absorb(self, query: Tensor, output: Tensor) -> None:
        """[num_tokens, heads, key_dim] -> [num_tokens, heads, latent], written to ``output``; both
        are views of whole heads."""
        self.keys.multiply(query, output)
        if self.key_lora is not None:
            self._adapt(self.key_lora, query, output)

    def results(self, attended: Tensor) -> Tensor:
        """[num_tokens, heads, latent] -> [num_tokens, heads, value_dim]"""
        output = attended.new_empty(*attended.shape[:2], self.value_dim)
        self.values.multiply(attended, output)
        if self.value_lora is not None:
            self._adapt(self.value_lora, attended, output)
        return output

    def _adapt(self, lora: LoraStack, hidden: Tensor, output: Tensor) -> None:
        heads = torch.arange(self.heads, device=hidden.device).expand(len(hidden), -1)
        lora.add_by_member(hidden.flatten(0, 1), output.view(-1, output.shape[-1]), heads)

    def placements(self, path: str) -> Iterator[Placement]:
        each = self.key_dim + self.value_dim
        size, start = (self.num_heads * each, self.columns), self.rank * self.heads * each
        yield Placement(path, size, slice(None), 0, start)

    def pack(self, kernels: LayerKernels) -> None:
        matrix = self.loadable
        assert isinstance(matrix, DecodableMatrix)
        weights = matrix.plain(slice(0, self.rows)).unflatten(0, (self.heads, -1))
        keys, values = weights.split([self.key_dim, self.value_dim], dim=1)
        self.keys = kernels.pack_heads(keys.transpose(1, 2).contiguous())
        self.values = kernels.pack_heads(values.contiguous())
        self.matrix = DenseMatrix(0, self.columns)
