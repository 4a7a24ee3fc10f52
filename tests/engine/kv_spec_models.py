"""Models whose layers keep other things than keys and values of one width, and their tokens by
plain PyTorch without a cache."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from radixrt.attention.backend import AttentionInputs, AttentionSpec, ForwardContext
from radixrt.attention.kv_spec import CachedTensor, KVSpec
from radixrt.layers.attention import AttentionBlock
from radixrt.layers.linear import ColumnParallelLinear, Projection, RowParallelLinear
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.rotary import RotaryEmbedding
from radixrt.layers.weights import parameter
from radixrt.models.decoder import CausalLM
from tests.checkpoints import _COMMON

HEADS, KV_HEADS = 4, 2
V_HEAD_DIM = 12
NOPE_DIM, ROPE_DIM, LATENT_DIM = 16, 8, 24
"""Of latent attention: features of a head's query and key that are not rotated, rotated ones, and
the latent's."""
THETA = 10000.0


class UnequalAttention(AttentionBlock):
    """Grouped-query attention whose values have fewer features than its keys."""

    def __init__(
        self, config: Any, index: int, rotary: RotaryEmbedding, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.index, self.rotary = index, rotary
        self.spec = AttentionSpec(HEADS, KV_HEADS, config.head_dim, config.head_dim**-0.5)
        sizes = {
            "q_proj": HEADS * config.head_dim,
            "k_proj": KV_HEADS * config.head_dim,
            "v_proj": KV_HEADS * V_HEAD_DIM,
        }
        projections = [Projection.even(name, size, tp) for name, size in sizes.items()]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, projections, bias=False)
        self.o_proj = RowParallelLinear(HEADS * V_HEAD_DIM, config.hidden_size, False, tp)

    def kv_spec(self, dtype: torch.dtype) -> KVSpec:
        return KVSpec.keys_and_values(KV_HEADS, self.spec.head_dim, dtype, V_HEAD_DIM)

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        query, key, value = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        query, key = self.rotary(
            positions, query.unflatten(-1, (HEADS, -1)), key.unflatten(-1, (KV_HEADS, -1))
        )
        value = value.unflatten(-1, (KV_HEADS, -1))
        kv_cache = context.kv_caches[self.index]
        return self.o_proj(
            context.backend.attend(AttentionInputs(query, key, value, kv_cache, self.spec)).flatten(
                1
            )
        )


class LatentAttention(AttentionBlock):
    """Multi-head latent attention (DeepSeek-V2) with its projections absorbed: all heads attend
    over one cached vector."""

    def __init__(
        self, config: Any, index: int, rotary: RotaryEmbedding, tp: TensorParallel
    ) -> None:
        super().__init__()
        self.index, self.rotary = index, rotary
        width = LATENT_DIM + ROPE_DIM
        self.spec = AttentionSpec(HEADS, 1, width, (NOPE_DIM + ROPE_DIM) ** -0.5)
        sizes = {"q_proj": HEADS * (NOPE_DIM + ROPE_DIM), "kv_a_proj": width}
        projections = [Projection.even(name, size, tp) for name, size in sizes.items()]
        self.down_proj = ColumnParallelLinear(config.hidden_size, projections, bias=False)
        self.key_up = parameter(HEADS, NOPE_DIM, LATENT_DIM)
        self.value_up = parameter(HEADS, V_HEAD_DIM, LATENT_DIM)
        self.o_proj = RowParallelLinear(HEADS * V_HEAD_DIM, config.hidden_size, False, tp)

    def kv_spec(self, dtype: torch.dtype) -> KVSpec:
        return KVSpec((CachedTensor((1, LATENT_DIM + ROPE_DIM), dtype),))

    def forward(self, hidden: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        query, kept = self.down_proj(hidden).split(self.down_proj.sizes, dim=-1)
        latent, rotated_key = kept.unsqueeze(1).split((LATENT_DIM, ROPE_DIM), dim=-1)
        query, rotated_query = query.unflatten(-1, (HEADS, -1)).split((NOPE_DIM, ROPE_DIM), dim=-1)
        rotated_query, rotated_key = self.rotary(
            positions, rotated_query.contiguous(), rotated_key.contiguous()
        )
        query = torch.einsum("thn,hnl->thl", query, self.key_up)
        attended = context.backend.attend(
            AttentionInputs(
                torch.cat((query, rotated_query), dim=-1),
                torch.cat((latent, rotated_key), dim=-1),
                latent,
                context.kv_caches[self.index],
                self.spec,
            )
        )
        return self.o_proj(torch.einsum("thl,hvl->thv", attended, self.value_up).flatten(1))


class UnequalForCausalLM(CausalLM):
    """Keys of 24 features a head, values of 12."""

    def attention(self, index: int, rotary: RotaryEmbedding) -> AttentionBlock:
        return UnequalAttention(self.config, index, rotary, self.tp)


class LatentForCausalLM(CausalLM):
    """One latent a layer."""

    def attention(self, index: int, rotary: RotaryEmbedding) -> AttentionBlock:
        return LatentAttention(self.config, index, rotary, self.tp)


class MixedForCausalLM(CausalLM):
    """A latent, plain keys and values, unequal keys and values: each layer keeps something else."""

    def attention(self, index: int, rotary: RotaryEmbedding) -> AttentionBlock:
        if index == 1:
            return super().attention(index, rotary)
        block = LatentAttention if index == 0 else UnequalAttention
        return block(self.config, index, rotary, self.tp)


HEAD_DIMS = {"UnequalForCausalLM": 24, "LatentForCausalLM": ROPE_DIM, "MixedForCausalLM": ROPE_DIM}
"""By architecture. A latent's rotary embedding is that of a head of so many features."""


def save_config(architecture: str, folder: Path) -> Path:
    """Save a checkpoint without weights in ``folder`` and return it."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": THETA}
    settings = {**_COMMON, "head_dim": HEAD_DIMS[architecture], "rope_parameters": rope}
    transformers.LlamaConfig(**settings, architectures=[architecture]).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- the same by plain PyTorch


def greedy_tokens(model: CausalLM, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of ``model``, whose weights are not packed: in float64, the whole sequence anew
    for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(_last_logits(model, tokens).argmax()))
    return tokens[len(prompt) :]


def _last_logits(model: CausalLM, tokens: list[int]) -> Tensor:
    hidden = _weight(model.model.embed_tokens)[tokens]
    for layer in model.model.layers:
        normed = _norm(hidden, layer.input_layernorm)
        hidden = hidden + _attention(layer.self_attn, normed)  # type: ignore[arg-type]
        normed = _norm(hidden, layer.post_attention_layernorm)
        gate, up = (normed @ _weight(layer.mlp.gate_up_proj).T).chunk(2, dim=-1)  # type: ignore[union-attr]
        hidden = hidden + (nn.functional.silu(gate) * up) @ _weight(layer.mlp.down_proj).T  # type: ignore[union-attr]
    return _norm(hidden[-1], model.model.norm) @ _weight(model.lm_head).T


def _weight(layer: Any) -> Tensor:
    return layer.matrix.weight.double()


def _norm(hidden: Tensor, norm: Any) -> Tensor:
    mean_square = hidden.square().mean(dim=-1, keepdim=True)
    return hidden / torch.sqrt(mean_square + norm.eps) * norm.weight.double()


def _attention(block: AttentionBlock, hidden: Tensor) -> Tensor:
    """[tokens, hidden_size] -> the same; every head has keys and values of its own."""
    if isinstance(block, LatentAttention):
        query, kept = (hidden @ _weight(block.down_proj).T).split(block.down_proj.sizes, dim=-1)
        plain, rotated = query.unflatten(-1, (HEADS, -1)).split((NOPE_DIM, ROPE_DIM), dim=-1)
        latent, rotated_key = kept.split((LATENT_DIM, ROPE_DIM), dim=-1)
        keys = torch.stack([latent @ up.double().T for up in block.key_up], dim=1)
        value = torch.stack([latent @ up.double().T for up in block.value_up], dim=1)
        rotated_keys = _rotated(rotated_key.unsqueeze(1)).expand(-1, HEADS, -1)
        query = torch.cat((plain, _rotated(rotated)), dim=-1)
        key = torch.cat((keys, rotated_keys), dim=-1)
    else:
        projected = hidden @ _weight(block.qkv_proj).T
        query, key, value = projected.split(block.qkv_proj.sizes, dim=-1)  # type: ignore[union-attr, arg-type]
        query = _rotated(query.unflatten(-1, (HEADS, -1)))
        key, value = (
            part.unflatten(-1, (KV_HEADS, -1)).repeat_interleave(HEADS // KV_HEADS, dim=1)
            for part in (key, value)
        )
        key = _rotated(key)
    scores = torch.einsum("qhf,khf->hqk", query, key) / query.shape[-1] ** 0.5
    later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
    attended = torch.einsum("hqk,khf->qhf", weights, value).flatten(1)
    return attended @ _weight(block.o_proj).T


def _rotated(heads: Tensor) -> Tensor:
    """[tokens, heads, features], each pair (i, i + features / 2) turned by position * THETA ** (-2
    i / features)."""
    half = heads.shape[-1] // 2
    turns = THETA ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(len(heads), dtype=torch.float64), turns).unsqueeze(1)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
