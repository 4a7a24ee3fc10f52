"""RMSNorm (Zhang & Sennrich, 2019), alone and after a residual addition."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from radixrt.layers.kernels.interface import KernelLayer
from radixrt.layers.parallel import TensorParallel
from radixrt.layers.weights import WeightSlot


class RMSNorm(KernelLayer):
    """``x / rms(x) * weight``, computed in float32; Gemma 2 and 3 store ``weight - 1``
    (``unit_offset``).

    The two variants also round differently: Llama rounds to the activations' dtype before it
    multiplies by the weight, Gemma after. In bfloat16 the results differ, so both are kept.
    """

    weight: Tensor

    def __init__(
        self, size: int, eps: float, unit_offset: bool = False, learned: bool = True
    ) -> None:
        """
        Args:
            learned: False: the weight is 1 and not in the checkpoint.
        """
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        initial = torch.zeros(size) if unit_offset else torch.ones(size)
        if learned:
            self.weight = nn.Parameter(initial, requires_grad=False)
        else:
            self.register_buffer("weight", initial, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., size] -> [..., size]"""
        return self.kernels.rms_norm(hidden, self.weight, self.eps, self.unit_offset)

    def add_and_norm(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add a block's output to the residual stream, then norm: (normed, new residual).

        Both inputs may be overwritten.
        """
        return self.kernels.add_rms_norm(hidden, residual, self.weight, self.eps, self.unit_offset)


class AllHeadsNorm(KernelLayer):
    """The RMSNorm of a query or a key over all of its heads together (OLMo 2), which are split over
    ranks."""

    def __init__(self, num_heads: int, head_dim: int, eps: float, tp: TensorParallel) -> None:
        """
        Args:
            num_heads: of the whole model. Where there are fewer than ranks, several ranks have
                each.
        """
        super().__init__()
        self.tp = tp
        self.eps = eps
        self.size = num_heads * head_dim
        self.start = tp.rank * num_heads // tp.size * head_dim
        rows = max(1, num_heads // tp.size) * head_dim
        self.weight = nn.Parameter(torch.ones(rows), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, heads of this rank, head_dim] -> the same"""
        flat = hidden.flatten(1)
        if self.tp.size == 1:
            return self.kernels.rms_norm(flat, self.weight, self.eps, False).view(hidden.shape)
        x = flat.float()
        mean = self.tp.all_reduce(x.square().mean(-1, keepdim=True)) / self.tp.size
        normed = (x * torch.rsqrt(mean + self.eps)).to(hidden.dtype) * self.weight
        return normed.view(hidden.shape)

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{path}.weight", WeightSlot((self.size,), self.weight, 0, self.start)
