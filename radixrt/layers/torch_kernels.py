"""The layers' operations in plain PyTorch: they run on any device and say what the other kernels compute."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from radixrt.layers.matrix import Matrix

GATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh"),
}
"""What is applied to the gate's half of a merged projection."""


class TorchKernels:
    """See ``LayerKernels``."""

    is_taped = True

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
    ) -> torch.Tensor:
        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        if unit_offset:
            return (x * (1.0 + weight.float())).to(hidden.dtype)
        return x.to(hidden.dtype) * weight

    def add_rms_norm(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        unit_offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + hidden
        return self.rms_norm(residual, weight, eps, unit_offset), residual

    def rotate(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)  # [tokens, 1, rotary_dim / 2]
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def gated_activation(self, name: str, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return GATED_ACTIVATIONS[name](gate) * up

    def experts(
        self,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
    ) -> torch.Tensor:
        """Each expert that got any tokens computes all of them at once."""
        order = experts.flatten().argsort(stable=True)  # (token, choice) pairs, expert by expert
        tokens = order // experts.shape[1]
        pair_weights = weights.flatten()[order].unsqueeze(-1)
        counts = experts.flatten().bincount(minlength=len(gate_up)).tolist()
        output = torch.zeros_like(hidden)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            pairs = slice(end, end + count)
            end += count
            merged = F.linear(hidden[tokens[pairs]], gate_up[expert])
            expert_output = F.linear(self.gated_activation(activation, merged), down[expert])
            weighted = expert_output * pair_weights[pairs]
            output.index_add_(0, tokens[pairs], weighted.to(output.dtype))
        return output

    def pack(self, matrix: Matrix) -> Matrix:
        return matrix


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    unchanged = x[..., rotary_dim:]
    return torch.cat([*(part.to(x.dtype) for part in rotated), unchanged], dim=-1)
