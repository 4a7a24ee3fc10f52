"""The matrix products of a layer, plain and quantized, and the sampler behind them."""

from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bench.kernels.machine import Case
from radixrt.base.sampling_params import SamplingParams
from radixrt.layers.quantization.scheme import BLOCK_KINDS
from radixrt.worker.sampling.sampler import draw_by_native_kernel, draw_by_torch, sample
from radixrt.worker.sampling.state import SamplingState
from radixrt_kernels import blockwise, groupwise, linear
from radixrt_kernels.memory import Slabs

SHAPES = ((9728, 896), (896, 4864))
"""Rows and columns: gate and up, down."""
BLOCK_SHAPES = ((4096, 1024), (1024, 4096))
"""As SHAPES, with columns that the blocks of every kind divide."""
TOKENS = (1, 4, 16, 64, 512)
DTYPE = torch.bfloat16
NOT_IN_CACHE = 128 << 20
"""Bytes of copies that a product takes turns with, so that its weights come from memory."""
VOCABULARIES = (32_000, 151_936)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-k 20": {"temperature": 0.7, "top_k": 20},
    "top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def cases() -> Iterator[Case]:
    for rows, columns in SHAPES:
        weights = [torch.randn(rows, columns).to(DTYPE) for _ in range(_copies(2 * rows * columns))]
        packed = [linear.pack(weight) for weight in weights]
        for tokens in TOKENS:
            yield _plain(tokens, weights, packed)
        for bits, group_size in ((8, columns), (4, 128)):
            matrices = _matrices(rows, columns, bits, group_size)
            for tokens in TOKENS:
                yield _quantized(tokens, matrices, weights)
    for rows, columns in BLOCK_SHAPES:
        weights = [torch.randn(rows, columns).to(DTYPE) for _ in range(_copies(2 * rows * columns))]
        for number, kind in BLOCK_KINDS.items():
            blocks = random_blocks(number, rows, columns)
            count, memory = _copies(blocks.nbytes), Slabs()
            packs = [blockwise.pack(blocks, number, rows, columns, memory) for _ in range(count)]
            for tokens in TOKENS:
                yield _blockwise(tokens, kind.name, packs, weights)
    for vocab in VOCABULARIES:
        for rows in (1, 16):
            for name, settings in SAMPLING.items():
                yield _sampling(name, rows, vocab, SamplingParams(seed=1, **settings))


def _copies(num_bytes: int) -> int:
    return max(2, NOT_IN_CACHE // num_bytes)


def _plain(tokens: int, weights: list[torch.Tensor], packed: list[torch.Tensor]) -> Case:
    rows, columns = weights[0].shape
    hidden, ours, theirs = torch.randn(tokens, columns).to(DTYPE), cycle(packed), cycle(weights)
    return Case(
        f"linear {tokens} x {columns} -> {rows}",
        lambda: linear.linear(hidden, next(ours), rows),
        lambda: F.linear(hidden, next(theirs)),
        num_bytes=weights[0].nbytes + hidden.nbytes + 2 * tokens * rows,
        operations=2 * tokens * rows * columns,
        dtype=DTYPE,
    )


def _quantized(
    tokens: int, matrices: list[groupwise.PackedCodes], weights: list[torch.Tensor]
) -> Case:
    """A product beside torch's on the plain weights. The bound is that of bfloat16's arithmetic,
    which whole numbers may beat."""
    m = matrices[0]
    hidden, ours, theirs = torch.randn(tokens, m.columns).to(DTYPE), cycle(matrices), cycle(weights)
    return Case(
        f"linear {tokens} x {m.columns} -> {m.rows}, {m.bits} bits",
        lambda: groupwise.linear(hidden, next(ours)),
        lambda: F.linear(hidden, next(theirs)),
        num_bytes=sum(t.nbytes for t in (m.codes, m.scales, m.zeros, hidden)) + 2 * tokens * m.rows,
        operations=2 * tokens * m.rows * m.columns,
        dtype=DTYPE,
    )


def _blockwise(
    tokens: int, kind: str, matrices: list[blockwise.PackedBlocks], weights: list[torch.Tensor]
) -> Case:
    """A product beside torch's on the plain weights, as :func:`_quantized`."""
    rows, columns = weights[0].shape
    hidden, ours, theirs = torch.randn(tokens, columns).to(DTYPE), cycle(matrices), cycle(weights)
    return Case(
        f"linear {tokens} x {columns} -> {rows}, {kind}",
        lambda: blockwise.linear(hidden, [next(ours)]),
        lambda: F.linear(hidden, next(theirs)),
        num_bytes=matrices[0].packed.nbytes + hidden.nbytes + 2 * tokens * rows,
        operations=2 * tokens * rows * columns,
        dtype=DTYPE,
    )


def random_blocks(number: int, rows: int, columns: int) -> torch.Tensor:
    """Blocks of GGUF's kind ``number`` with finite scales, uint8 [rows, bytes of a row]."""
    kind = BLOCK_KINDS[number]
    row_bytes = columns // kind.columns * kind.num_bytes
    blocks = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8) & 0xBF
    if kind.name == "MXFP4":  # subnormal products would take longer
        exponents = blocks[:, :: kind.num_bytes]
        exponents.copy_(120 + exponents % 8)
    return blocks


def _matrices(rows: int, columns: int, bits: int, group_size: int) -> list[groupwise.PackedCodes]:
    groups = -(-columns // group_size)
    codes, zeros = (
        torch.randint(0, 1 << bits, (rows, count), dtype=torch.uint8) for count in (columns, groups)
    )
    scales = torch.rand(rows, groups).half()
    count = _copies(rows * columns * bits // 8)
    return [groupwise.pack(codes, scales, zeros, bits, group_size) for _ in range(count)]


def _sampling(name: str, rows: int, vocab: int, params: SamplingParams) -> Case:
    logits = torch.randn(rows, vocab) * 3
    slots, positions = np.arange(rows), torch.zeros(rows, dtype=torch.int64)

    state = SamplingState(rows, vocab)
    for slot in range(rows):
        state.admit(slot, params, np.array([1], dtype=np.int32), 0)

    return Case(
        f"sample {rows} x {vocab}, {name}",
        lambda: sample(state, logits, slots, positions, draw=draw_by_native_kernel),
        lambda: sample(state, logits, slots, positions, draw=draw_by_torch),
        num_bytes=logits.nbytes,
        operations=logits.numel(),
        dtype=torch.float32,
        in_cache=True,
    )
