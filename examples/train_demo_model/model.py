"""The trained model: a Llama in plain torch with the same weights as transformers' Llama."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 384
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 8192
    rope_theta: float = 1000000.0
    rms_norm_eps: float = 1e-5

    def hf_config(self) -> dict:
        """The config.json for transformers 4.56 to 5.x."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


EMBED_STD = 0.06


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope_tables(shape: LlamaShape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim], in the half-rotated layout of transformers."""
    freq = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angle = torch.outer(torch.arange(length).float(), freq)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.s = s
        q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.q_proj = nn.Linear(s.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        s = self.s
        q = self.q_proj(x).view(b, t, s.num_attention_heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = MLP(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, s: LlamaShape, stream: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.s = s
        self.stream = stream  # dtype of the residual stream; the weights are float32 in training
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        cos, sin = rope_tables(s, s.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                # Layers start as the identity, so that the next layer gets the token itself.
                adds_to_stream = "o_proj" in name or "down_proj" in name
                std = EMBED_STD if "embed" in name else 0.02
                nn.init.normal_(p, std=0.0 if adds_to_stream else std)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> final hidden states [batch, length, hidden_size]."""
        t = tokens.shape[1]
        x = self.embed_tokens(tokens).to(self.stream)
        cos, sin = self.cos[:t].to(x.dtype), self.sin[:t].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size]; the embedding is tied."""
        return F.linear(hidden, self.embed_tokens.weight)


def orthonormal(rows: int, cols: int) -> Tensor:
    """Random matrix [rows, cols], rows <= cols, with orthonormal rows."""
    return torch.linalg.qr(torch.randn(cols, cols))[0][:rows]


@torch.no_grad()
def plant_induction(model: Llama) -> None:
    """Initialize the first two layers as an induction circuit (Olsson et al. 2022).

    Layer 0: heads that attend one, one, two and three tokens back and write the token they find.
    They locate the position by RoPE's fast frequencies against a channel that is constant in every
    embedding. Layer 1: heads that attend to a key whose previous token is the current one, with
    RoPE's slow frequencies, which hardly depend on distance. They copy the token found there to the
    output.
    """
    s = model.s
    half, width = s.head_dim // 2, s.hidden_size
    freq = s.rope_theta ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim)
    fast, slow = 8, half // 2
    constant = 5 * EMBED_STD
    model.embed_tokens.weight[:, 0] = constant

    def place(offset: int) -> Tensor:
        v = torch.zeros(s.head_dim)
        v[:fast] = torch.cos(freq[:fast] * offset)
        v[half : half + fast] = torch.sin(freq[:fast] * offset)
        return 1.4 * v

    first, second = model.layers[0].self_attn, model.layers[1].self_attn
    offsets = (1, 1, 2, 3)
    reads, writes = [], []
    for h, offset in enumerate(offsets):
        rows = slice(h * s.head_dim, (h + 1) * s.head_dim)
        first.k_proj.weight[rows, 0] = place(0)
        first.q_proj.weight[rows, 0] = place(-offset)
        reads.append(orthonormal(s.head_dim, width))
        writes.append(orthonormal(s.head_dim, width))
        first.v_proj.weight[rows] = reads[h]
        first.o_proj.weight[:, rows] = (0.12 if offset == 1 else 0.06) * writes[h].T
    copies = orthonormal(width, width)
    for h in range(s.num_attention_heads):
        rows = slice(h * s.head_dim, (h + 1) * s.head_dim)
        # Two heads of layer 0 saw the previous token, each through its own 64 dimensions.
        seen, part = h % 2, slice(h // 2 * 2 * slow, (h // 2 + 1) * 2 * slow)
        slow_rows = [
            *range(rows.start + slow, rows.start + half),
            *range(rows.start + half + slow, rows.stop),
        ]
        second.q_proj.weight[slow_rows] = 2.5 * reads[seen][part]
        second.k_proj.weight[slow_rows] = 2.5 * writes[seen][part]
        second.v_proj.weight[rows] = copies[rows]
        second.o_proj.weight[:, rows] = 0.25 * copies[rows].T
