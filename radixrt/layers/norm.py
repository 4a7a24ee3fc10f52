"""RMSNorm (Zhang & Sennrich, 2019), alone and after a residual addition."""

import torch
from torch import nn


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``, computed in float32; Gemma stores ``weight - 1`` (``unit_offset``).

    The two variants also round differently: Llama rounds to the activations' dtype before it multiplies
    by the weight, Gemma after. In bfloat16 that is visible, so both are kept.
    """

    def __init__(self, size: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        initial = torch.zeros(size) if unit_offset else torch.ones(size)
        self.weight = nn.Parameter(initial, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]"""
        x = hidden.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (x * (1.0 + self.weight.float())).to(hidden.dtype)
        return x.to(hidden.dtype) * self.weight

    def add_and_norm(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add a block's output to the residual stream, then norm: (normed, new residual)."""
        residual = residual + hidden
        return self.forward(residual), residual
