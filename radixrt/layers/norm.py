"""RMSNorm (Zhang & Sennrich, 2019), alone and after a residual addition."""

import torch
from torch import Tensor, nn

from radixrt.layers.kernels.interface import KernelLayer


class RMSNorm(KernelLayer):
    """``x / rms(x) * weight``, computed in float32; Gemma stores ``weight - 1`` (``unit_offset``).

    The two variants also round differently: Llama rounds to the activations' dtype before it multiplies
    by the weight, Gemma after. In bfloat16 the results differ, so both are kept.
    """

    def __init__(self, size: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        initial = torch.zeros(size) if unit_offset else torch.ones(size)
        self.weight = nn.Parameter(initial, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return self.kernels.rms_norm(hidden, self.weight, self.eps, self.unit_offset)

    def add_and_norm(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add a block's output to the residual stream, then norm: (normed, new residual).

        Both inputs may be overwritten.
        """
        return self.kernels.add_rms_norm(hidden, residual, self.weight, self.eps, self.unit_offset)
