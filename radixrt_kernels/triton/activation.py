"""The activations of gated MLPs (Shazeer, 2020): ``act(gate) * up`` of a merged projection."""

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of

BLOCK = 1024
GATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")


@triton.jit
def activate(gate, NAME: tl.constexpr):
    """float32 -> float32"""
    if NAME == "silu":
        return gate * tl.sigmoid(gate)
    if NAME == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    # 0.5 * (1 + tanh(u)) is sigmoid(2 u)
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner)


@triton.jit
def _gated_activation_kernel(
    gate_up, output, row_stride, size, NAME: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + size + column, mask=inside, other=0.0)
    if NAME == "clamped_swiglu":
        bounded = tl.minimum(gate.to(tl.float32), 7.0)
        more = tl.minimum(tl.maximum(up.to(tl.float32), -7.0), 7.0) + 1.0
        product = bounded * tl.sigmoid(1.702 * bounded) * more
    else:
        activated = activate(gate.to(tl.float32), NAME).to(gate.dtype)
        product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(output + row * size + column, product.to(gate.dtype), mask=inside)


def gated_activation(name: str, gate_up: torch.Tensor) -> torch.Tensor:
    """Compute ``activation(gate) * up``; of ``clamped_swiglu`` ``gate * sigmoid(1.702 gate) * (up +
    1)``, both at most 7.

    Args:
        name: one of GATED_ACTIVATIONS.
        gate_up: [num_tokens, 2 * size], gate first; rows are contiguous.

    Returns:
        [num_tokens, size]
    """
    if name not in GATED_ACTIVATIONS:
        raise ValueError(f"{name!r} is none of {', '.join(GATED_ACTIVATIONS)}")
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = block_of(size, BLOCK)
    if tokens:
        _gated_activation_kernel[(tokens, triton.cdiv(size, block))](
            gate_up, output, gate_up.stride(0), size, NAME=name, BLOCK=block, num_warps=4
        )
    return output
