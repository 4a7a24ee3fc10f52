"""RMSNorm (Zhang & Sennrich, 2019) with the rounding of Llama's and of Gemma's code."""

import torch


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """[..., size] -> [..., size]"""
    x = hidden.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (x * (1.0 + weight.float())).to(hidden.dtype)
    return x.to(hidden.dtype) * weight
