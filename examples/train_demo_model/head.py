"""An EAGLE-3 head for the trained model (Li et al., 2025), in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from model import MLP, Llama, LlamaShape, RMSNorm, orthonormal, rope_tables, rotate
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadShape(LlamaShape):
    """The sizes of the head's one layer."""

    intermediate_size: int = 256
    num_hidden_layers: int = 1
    num_key_value_heads: int = 2
    draft_vocab_size: int = 768
    layers: tuple[int, int, int] = (1, 3, 4)
    """Layers of the model whose inputs the head reads."""

    def hf_config(self) -> dict:
        """The config.json in SGLang's form, but for the layers, which speculators' field names."""
        config = super().hf_config() | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_aux_hidden_state_layer_ids": list(self.layers),
            "tie_word_embeddings": False,
        }
        return {name: value for name, value in config.items() if name != "layers"}


@torch.no_grad()
def states_and_scores(
    model: Llama, layers: tuple[int, ...], tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """What a head reads and what it is to predict: [batch, length, 3 * hidden_size], and the last
    hidden states [batch, length, hidden_size]."""
    x = model.embed_tokens(tokens).to(model.stream)
    cos, sin = (table[: tokens.shape[1]].to(x.dtype) for table in (model.cos, model.sin))
    kept = []
    for index, layer in enumerate(model.layers):
        if index in layers:
            kept.append(x)
        x = layer(x, cos, sin)
    return torch.cat(kept, -1), model.norm(x)


class ChainAttention(nn.Module):
    """Attention of the n-th token of a chain: to the true entries up to the chain's beginning, and
    to those of the chain itself, one a step."""

    def __init__(self, s: HeadShape) -> None:
        super().__init__()
        self.s = s
        q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(2 * s.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(2 * s.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, before: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """x [batch, length, 2 * hidden_size]; ``before`` has keys and values of the steps before,
        the first of which are the true ones, and gets those of this step."""
        s, (b, t, _) = self.s, x.shape
        groups = s.num_attention_heads // s.num_key_value_heads
        q = self.q_proj(x).view(b, t, s.num_attention_heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        q = rotate(q, cos, sin)
        k, v = (y.repeat_interleave(groups, 1) for y in (rotate(k, cos, sin), v))
        before.append((k, v))
        if len(before) == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        true_keys, true_values = before[0]
        scale, steps = s.head_dim**-0.5, len(before) - 1
        scores = q @ true_keys.transpose(2, 3) * scale
        visible = torch.ones(t, t, dtype=torch.bool).tril(-steps)
        scores = scores.masked_fill(~visible, float("-inf"))
        own = []
        for step, (keys, values) in enumerate(before[1:], 1):
            # of the position that this step's chain had reached then
            keys, values = (F.pad(y, (0, 0, steps - step, 0))[:, :, :t] for y in (keys, values))
            own.append(((q * keys).sum(-1, keepdim=True) * scale, values))
        weights = torch.cat((scores, *(score for score, _ in own)), -1).softmax(-1)
        y = weights[..., :t] @ true_values
        for step, (_, values) in enumerate(own):
            y = y + weights[..., t + step : t + step + 1] * values
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class HeadLayer(nn.Module):
    def __init__(self, s: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.hidden_norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = ChainAttention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)


class Head(nn.Module):
    """The head. Its embedding is the model's."""

    def __init__(self, s: HeadShape, model: Llama, token_ids: Tensor) -> None:
        """
        Args:
            token_ids: [draft_vocab_size] ascending, the model's ids that the head drafts.
        """
        super().__init__()
        self.s = s
        self.model = [model]  # no part of this module
        self.fc = nn.Linear(3 * s.hidden_size, s.hidden_size, bias=False)
        self.midlayer = HeadLayer(s)
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = nn.Linear(s.hidden_size, s.draft_vocab_size, bias=False)
        cos, sin = rope_tables(s, s.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        plant_copying(self)

    def chains(self, tokens: Tensor, states: Tensor, length: int) -> list[Tensor]:
        """Hidden states for :attr:`lm_head` of the chains that end at each position, one token
        longer each: ``length`` of [batch, tokens - 1, hidden_size]. That of position p is for the
        token behind ``tokens[:, p + 1]``.

        Args:
            states: [batch, tokens, 3 * hidden_size] of the model.
        """
        layer, before, found = self.midlayer, [], []
        embedded = layer.input_layernorm(self.model[0].embed_tokens(tokens[:, 1:]))
        cos, sin = self.cos[: tokens.shape[1] - 1], self.sin[: tokens.shape[1] - 1]
        rows = self.fc(states[:, :-1])
        for _ in range(length):
            read = torch.cat((embedded, layer.hidden_norm(rows)), -1)
            hidden = rows + layer.self_attn(read, cos, sin, before)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.norm(hidden))
            rows = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return found


@torch.no_grad()
def plant_copying(head: Head) -> None:
    """Initialize the head so that it finds where the current token occurred before, and drafts the
    token behind that place.

    An entry has a token, and the model's state behind the one before it, in which that one's
    embedding is still found. So keys read the state where queries read the token, both in RoPE's
    slow frequencies. Values read the token, which the tied part of the model's embedding turns into
    scores.
    """
    s, attention = head.s, head.midlayer.self_attn
    embedding = head.model[0].embed_tokens.weight
    width, dim, half = s.hidden_size, s.head_dim, s.head_dim // 2
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.0 if "down_proj" in name else 0.02)
    head.fc.weight.zero_()
    head.fc.weight[:, :width] = torch.eye(width)
    head.lm_head.weight.copy_(embedding[head.token_ids])
    slow = half // 2
    copies = orthonormal(width, width)
    groups = s.num_attention_heads // s.num_key_value_heads
    for kv in range(s.num_key_value_heads):
        first = kv * dim
        rows = [*range(first + slow, first + half), *range(first + half + slow, first + dim)]
        reads = orthonormal(2 * slow, width)
        attention.k_proj.weight[rows, width:] = 2.5 * reads
        attention.v_proj.weight[first : first + dim, :width] = copies[first : first + dim]
        attention.v_proj.weight[first : first + dim, width:] = 0.0
        for query in range(kv * groups, (kv + 1) * groups):
            moved = [row + (query - kv) * dim for row in rows]
            attention.q_proj.weight[moved, :width] = 2.5 * reads
            at = slice(query * dim, (query + 1) * dim)
            attention.o_proj.weight[:, at] = 0.25 * copies[first : first + dim].T
