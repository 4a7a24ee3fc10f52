"""The operations of layers that each kind of device computes by kernels of its own, in plain
PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from radixrt.layers.lora import LoraKernels
from radixrt.layers.matrix import HeadMatrices, Matrix, MatrixStack, Weights
from radixrt_kernels.reference import recurrence

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""The sigmoid's gain in ``clamped_swiglu``, and the bound of both halves."""


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)


GATED_ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _clamped_swiglu,
}
"""Functions of the two halves of a merged projection, by name; ``clamped_swiglu`` is gpt-oss's."""


Choice = tuple[Tensor, Tensor]
"""Experts of each token: weights float32 and expert ids int64, both [num_tokens, top_k]."""

Stacks = tuple[MatrixStack, MatrixStack]
"""Gate and up of each expert, [2 * size, hidden_size], gate first; and down, [hidden_size, size].
Both may have biases."""


class LayerKernels:
    """The operations between a model's attention calls. These run on any device, and are the
    reference of the subclasses."""

    is_taped = True
    """``radixrt_kernels.trace`` can record every call, so that a step can be replayed without its
    layers."""

    multiplies_quantized_experts = True
    """False: mixtures of experts are served with plain weights only."""

    multiplies_blocks = False
    """True: the quantized blocks of GGUF files stay as they are; else they are dequantized."""

    recurrence: Any = recurrence
    """The functions of ``radixrt_kernels.recurrence``, which advance the states of sequences."""

    lora: LoraKernels | None = None
    """The products of LoRA adapters; None: they are not served."""

    def rms_norm(self, hidden: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        """[..., size] -> [..., size]; ``RMSNorm`` explains ``unit_offset``."""
        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        if unit_offset:
            return (x * (1.0 + weight.float())).to(hidden.dtype)
        return x.to(hidden.dtype) * weight

    def add_rms_norm(
        self, hidden: Tensor, residual: Tensor, weight: Tensor, eps: float, unit_offset: bool
    ) -> tuple[Tensor, Tensor]:
        """(norm of hidden + residual, hidden + residual), both [num_tokens, size]. May overwrite
        its inputs."""
        residual = residual + hidden
        return self.rms_norm(residual, weight, eps, unit_offset), residual

    def rotate(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        cos_sin: Tensor,
        interleaved: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first ``rotary_dim`` features of each head. May overwrite its inputs.

        Args:
            positions: [num_tokens] int64 query, key: [num_tokens, heads, head_dim], or views of one
                merged projection; the key may have no heads
            cos_sin: [context_length, rotary_dim] float32, cosines then sines
            interleaved: the rotated pairs are neighbours. They may be returned in the order of
                halves: scores do not depend on an order that queries and keys share.
        """
        if interleaved:
            query, key = in_halves(query), in_halves(key)
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        """[num_tokens, 2 * size] -> [num_tokens, size]; gate first. ``name`` is one of
        ``GATED_ACTIVATIONS``, or ``relu2``: [num_tokens, size] -> the same."""
        if name == "relu2":
            return gate_up.relu().square()
        gate, up = gate_up.chunk(2, dim=-1)
        return GATED_ACTIVATIONS[name](gate, up)

    def sigmoid_gate(self, gate: Tensor, values: Tensor | None = None) -> Tensor:
        """``values * sigmoid(gate)``, or the sigmoid alone; gate [num_tokens, heads, size] or
        [num_tokens, heads, 1], values and result [num_tokens, heads, size]"""
        return gate.sigmoid() if values is None else values * gate.sigmoid()

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        """``cap * tanh(logits / cap)``: float32 [rows, vocab] -> the same. May overwrite its
        input."""
        return cap * torch.tanh(logits / cap)

    def choose_experts(self, logits: Tensor, top_k: int, *, normalize: bool) -> Choice:
        """The ``top_k`` experts of the largest logits.

        Args:
            logits: [num_tokens, num_experts]
            normalize: the chosen experts' weights sum to 1; else those of all experts do.
        """
        probabilities = logits.float().softmax(dim=-1)
        weights, experts = probabilities.topk(top_k, dim=-1)
        if normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, experts

    def experts(
        self,
        hidden: Tensor,
        choice: Choice,
        stacks: Stacks,
        activation: str,
        *,
        is_part: bool = False,
    ) -> Tensor:
        """The weighted sum of the chosen experts' gated MLPs. Each expert that got any tokens
        computes all of them at once.

        Args:
            hidden: [num_tokens, hidden_size]
            is_part: the stacks have some of the experts. A choice of any other, whose number is
                below 0 or beyond the stacks, adds nothing.
        """
        (weights, experts), (gate_up, down) = choice, stacks
        assert gate_up.lora is None and down.lora is None, "these kernels serve no adapters"
        if is_part:  # the others become the last in the order
            experts = among(experts, gate_up.count)
        order = experts.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        tokens = order // experts.shape[1]
        pair_weights = weights.flatten()[order].unsqueeze(-1)
        counts = experts.flatten().bincount(minlength=gate_up.count)[: gate_up.count].tolist()
        output = torch.zeros_like(hidden)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            pairs = slice(end, end + count)
            end += count
            merged = gate_up.multiply(expert, hidden[tokens[pairs]])
            activated = self.gated_activation(activation, merged)
            expert_output = down.multiply(expert, activated)
            weighted = expert_output * pair_weights[pairs]
            output.index_add_(0, tokens[pairs], weighted.to(output.dtype))
        return output

    def pack(self, matrix: Matrix) -> Matrix:
        """A loaded matrix in the form that these kernels multiply by fastest; perhaps ``matrix``
        itself."""
        return matrix

    def pack_heads(self, weight: Tensor) -> HeadMatrices:
        """As ``pack``, of a plain matrix for each head: [heads, rows, columns]"""
        return HeadMatrices(weight)

    def pack_stack(self, matrix: Matrix, count: int) -> Weights:
        """As ``pack``, of a stack of ``count`` matrices."""
        return matrix


def among(experts: Tensor, count: int) -> Tensor:
    """Expert ids, ``count`` in place of those that are not from 0 to ``count - 1``."""
    return torch.where((experts >= 0) & (experts < count), experts, count)


def in_halves(heads: Tensor) -> Tensor:
    """[..., head_dim] -> the same: the features with even indices, then the others."""
    return torch.cat([heads[..., 0::2], heads[..., 1::2]], dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    unchanged = x[..., rotary_dim:]
    return torch.cat([*(part.to(x.dtype) for part in rotated), unchanged], dim=-1)


class KernelLayer(nn.Module):
    """A layer that computes by kernels: PyTorch's, unless :func:`use_kernels` replaces them."""

    kernels = LayerKernels()


def use_kernels(model: nn.Module, kernels: LayerKernels) -> None:
    """Let every layer of ``model`` compute by ``kernels``."""
    for module in model.modules():
        if isinstance(module, KernelLayer):
            module.kernels = kernels
