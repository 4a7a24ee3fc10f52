"""What stands between the matrix products of a layer: norm, rotation, activation."""

from collections.abc import Iterator

import torch

from bench.kernels.machine import Case
from radixrt.layers.kernels.interface import LayerKernels
from radixrt.layers.kernels.native import NativeKernels

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM = 896, 4864, 14, 2, 64
TOKENS = (1, 16, 512)
DTYPE = torch.bfloat16


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield _norm(tokens)
        yield _rotation(tokens)
        yield _activation(tokens)


def _norm(tokens: int) -> Case:
    hidden, residual = (torch.randn(tokens, HIDDEN).to(DTYPE) for _ in range(2))
    arguments = (torch.ones(HIDDEN, dtype=DTYPE), 1e-6, False)
    return Case(
        f"add_rms_norm {tokens} x {HIDDEN}",
        lambda: NativeKernels().add_rms_norm(hidden, residual, *arguments),
        lambda: LayerKernels().add_rms_norm(hidden, residual, *arguments),
        num_bytes=4 * hidden.nbytes,  # both are read and written
        operations=5 * hidden.numel(),
        dtype=torch.float32,
        in_cache=True,
    )


def _rotation(tokens: int) -> Case:
    query = torch.randn(tokens, HEADS, HEAD_DIM).to(DTYPE)
    key = torch.randn(tokens, KV_HEADS, HEAD_DIM).to(DTYPE)
    positions, table = torch.arange(tokens), torch.zeros(tokens, HEAD_DIM)
    table[:, : HEAD_DIM // 2] = (
        1  # no rotation: repeated in place, any other would be no other work
    )
    return Case(
        f"rotate {tokens} x {HEADS} + {KV_HEADS} heads",
        lambda: NativeKernels().rotate(positions, query, key, table),
        lambda: LayerKernels().rotate(positions, query, key, table),
        num_bytes=2 * (query.nbytes + key.nbytes) + table.nbytes,
        operations=3 * (query.numel() + key.numel()),
        dtype=torch.float32,
        in_cache=True,
    )


def _activation(tokens: int) -> Case:
    gate_up = torch.randn(tokens, 2 * MLP).to(DTYPE)
    return Case(
        f"silu_and_mul {tokens} x {MLP}",
        lambda: NativeKernels().gated_activation("silu", gate_up),
        lambda: LayerKernels().gated_activation("silu", gate_up),
        num_bytes=1.5 * gate_up.nbytes,
        operations=10 * gate_up.numel(),
        dtype=torch.float32,
        in_cache=True,
    )
