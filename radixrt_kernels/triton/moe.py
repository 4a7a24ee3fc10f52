"""A mixture of experts in four launches: sort the (token, expert) pairs, multiply, activate,
multiply.

The pairs of one expert are consecutive and padded to whole blocks, so each block of the matrix
product has the weights of one expert. The number of blocks is known only on the device. The grid
has the maximum number of blocks, and surplus blocks return at once. The host therefore does not
wait for the device, and a captured graph can be replayed for any routing. The layout follows the
fused MoE kernels of vLLM and SGLang. The sort has no atomics, so equal inputs give equal bits.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.activation import gated_activation
from radixrt_kernels.triton.launching import block_of

SCAN = 1024
"""Pairs that a program of the sort processes together."""


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(experts, counts, pairs, SCAN: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, SCAN)
    count = tl.zeros((SCAN,), tl.int32)
    for start in range(0, pairs, SCAN):
        chosen = tl.load(experts + start + lane, mask=start + lane < pairs, other=-1)
        count += (chosen == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, axis=0))


@triton.jit(do_not_specialize=["pairs"])
def _place_kernel(
    experts, counts, sorted_pairs, block_experts, num_blocks, pairs, num_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Write one expert's pairs in order to its blocks. The rest of its last block keeps the value
    ``pairs``."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts + other, mask=other < num_experts, other=0) + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(other < expert, blocks, 0), axis=0)
    own_blocks = tl.sum(tl.where(other == expert, blocks, 0), axis=0)
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, axis=0))
    for block in range(first_block, first_block + own_blocks):
        tl.store(block_experts + block, expert)
    lane = tl.arange(0, SCAN)
    place = first_block * ROWS
    for start in range(0, pairs, SCAN):
        pair = start + lane
        ours = tl.load(experts + pair, mask=pair < pairs, other=-1) == expert
        before = tl.cumsum(ours.to(tl.int32), axis=0) - 1
        tl.store(sorted_pairs + place + before, pair, mask=ours)
        place += tl.sum(ours.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["pairs"])
def _grouped_matmul_kernel(
    hidden, matrices, biases, output, pair_weights, sorted_pairs, block_experts, num_blocks,
    pairs, rows_out, columns, hidden_stride, matrix_stride,
    PAIRS_A_ROW: tl.constexpr, BIASED: tl.constexpr, WEIGHTED: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """Compute one block of ``output[pair] = matrices[expert of pair] @ hidden[pair //
    PAIRS_A_ROW]``."""
    block = tl.program_id(1)
    if block < tl.load(num_blocks):
        expert = tl.load(block_experts + block).to(tl.int64)
        pair = tl.load(sorted_pairs + block * ROWS + tl.arange(0, ROWS))
        real = pair < pairs
        row = (pair // PAIRS_A_ROW).to(tl.int64)
        out = tl.program_id(0) * OUT + tl.arange(0, OUT)
        inner = tl.arange(0, IN)
        hidden_at = hidden + row[:, None] * hidden_stride + inner[None, :]
        # Outputs after the last row read the first rows again, and are not written.
        matrix_row = (out % rows_out).to(tl.int64)
        matrix_at = (
            matrices + expert * matrix_stride + matrix_row[None, :] * columns + inner[:, None]
        )
        sums = tl.zeros((ROWS, OUT), tl.float32)
        for start in range(0, columns, IN):
            if WHOLE:
                x = tl.load(hidden_at, mask=real[:, None], other=0.0)
                w = tl.load(matrix_at)
            else:
                inside = start + inner < columns
                x = tl.load(hidden_at, mask=real[:, None] & inside[None, :], other=0.0)
                w = tl.load(matrix_at, mask=inside[:, None], other=0.0)
            sums = tl.dot(x, w, sums, input_precision="ieee")
            hidden_at += IN
            matrix_at += IN
        if BIASED:
            bias = tl.load(biases + expert * rows_out + out, mask=out < rows_out, other=0.0)
            sums += bias[None, :].to(tl.float32)
        if WEIGHTED:
            sums *= tl.load(pair_weights + pair, mask=real, other=0.0)[:, None]
        output_at = output + pair.to(tl.int64)[:, None] * rows_out + out[None, :]
        inside = real[:, None] & (out < rows_out)[None, :]
        tl.store(output_at, sums.to(output.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Block sizes of the grouped matrix product."""

    rows: int
    """Pairs per block."""
    out: int
    """Output features per block."""
    inner: int
    """Input features per step."""
    warps: int
    stages: int

    @staticmethod
    def of(pairs: int, num_experts: int) -> "Tiling":
        """Select block sizes by the average number of pairs per expert. Few pairs: reading weights
        is the limit, so blocks are flat with many loads in flight. Many pairs: the tensor cores are
        the limit, so blocks are square. The sizes are estimates; not yet measured on a GPU."""
        average = pairs / num_experts
        if average <= 16:
            return Tiling(16, 64, 128, 4, 5)
        if average <= 32:
            return Tiling(32, 64, 128, 4, 4)
        if average <= 128:
            return Tiling(64, 128, 64, 4, 4)
        return Tiling(128, 128, 64, 8, 4)


@dataclass(frozen=True, slots=True)
class Routing:
    """The pairs of a step, sorted by expert, in whole blocks."""

    sorted_pairs: torch.Tensor  # [max_blocks * rows] int32; padding has the number of pairs
    block_experts: torch.Tensor  # [max_blocks] int32
    num_blocks: torch.Tensor  # [1] int32
    max_blocks: int


def route(experts: torch.Tensor, num_experts: int, rows: int) -> Routing:
    """Sort pairs by expert.

    Args:
        experts: [num_tokens, top_k] integers; pair ``i`` is token ``i // top_k``.
        rows: per block.
    """
    pairs = experts.numel()
    # Each expert with pairs may have one padded block; there are at most pairs // rows full blocks.
    max_blocks = pairs // rows + min(num_experts, pairs)
    device = experts.device
    counts = torch.empty(num_experts, dtype=torch.int32, device=device)
    sorted_pairs = torch.full((max_blocks * rows,), pairs, dtype=torch.int32, device=device)
    block_experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    scan = block_of(pairs, SCAN)
    _count_kernel[(num_experts,)](experts, counts, pairs, SCAN=scan, num_warps=4)
    _place_kernel[(num_experts,)](
        experts, counts, sorted_pairs, block_experts, num_blocks, pairs, num_experts,
        ROWS=rows, EXPERTS=block_of(num_experts), SCAN=scan, num_warps=4,
    )  # fmt: skip
    return Routing(sorted_pairs, block_experts, num_blocks, max_blocks)


def _multiply(
    hidden: torch.Tensor,
    matrices: torch.Tensor,
    biases: torch.Tensor | None,
    routing: Routing,
    tiling: Tiling,
    pairs: int,
    pair_weights: torch.Tensor | None,
    zero: bool = False,
) -> torch.Tensor:
    """Multiply [rows, columns] by the pairs' matrices [num_experts, rows_out, columns], and add
    their biases [num_experts, rows_out]. Returns [pairs, rows_out]; with ``zero``, rows of pairs
    that have no matrix are 0."""
    rows_out, columns = matrices.shape[1:]
    make = torch.zeros if zero else torch.empty
    output = make((pairs, rows_out), dtype=hidden.dtype, device=hidden.device)
    inner = block_of(columns, tiling.inner) if columns >= 16 else 16
    _grouped_matmul_kernel[(triton.cdiv(rows_out, tiling.out), routing.max_blocks)](
        hidden, matrices, hidden if biases is None else biases, output, hidden if pair_weights is None else pair_weights,
        routing.sorted_pairs, routing.block_experts, routing.num_blocks,
        pairs, rows_out, columns, hidden.stride(0), matrices.stride(0),
        PAIRS_A_ROW=pairs // len(hidden), BIASED=biases is not None, WEIGHTED=pair_weights is not None,
        WHOLE=columns % inner == 0, ROWS=tiling.rows, OUT=tiling.out, IN=inner,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return output


Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]
"""Adds to outputs [pairs, rows] what inputs [tokens or pairs, columns] give, times factors of the
pairs, float32 [pairs]; None: 1."""


def experts_mlp(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    is_part: bool = False,
    adapters: tuple[Add, Add] | None = None,
) -> torch.Tensor:
    """Compute the weighted sum of the selected experts' gated MLPs, accumulated in float32.

    Args:
        hidden: [num_tokens, hidden_size]
        weights: [num_tokens, top_k] float32
        experts: [num_tokens, top_k] integers; the experts of a token are different
        gate_up: [num_experts, 2 * size, hidden_size], contiguous
        down: [num_experts, hidden_size, size], contiguous
        activation: one of ``GATED_ACTIVATIONS``.
        biases: of gate_up and of down, [num_experts, rows of a matrix] each
        is_part: numbers outside of 0 to num_experts - 1 may be chosen, and add nothing
        adapters: called with the inputs and the outputs of gate_up and of down, to which they add;
            None: there are none

    Returns:
        as hidden
    """
    tokens, top_k = experts.shape
    pairs = tokens * top_k
    if not pairs:
        return torch.zeros_like(hidden)
    tiling = Tiling.of(pairs, len(gate_up))
    routing = route(experts, len(gate_up), tiling.rows)
    merged = _multiply(hidden, gate_up, biases[0], routing, tiling, pairs, None)
    if adapters is not None:
        adapters[0](hidden, merged, None)
    activated = gated_activation(activation, merged)
    flat_weights = weights.reshape(-1).float()
    output = _multiply(activated, down, biases[1], routing, tiling, pairs, flat_weights, is_part)
    if adapters is not None:
        adapters[1](activated, output, flat_weights)
    return output.view(tokens, top_k, -1).sum(dim=1)
