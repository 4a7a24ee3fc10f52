"""Low-rank adapters of linear layers: two launches a layer, between which products stay in float32.

As in SGMV (Chen et al., "Punica", 2023), rows are sorted by adapter into blocks, so that each
block has the weights of one adapter: the first launch multiplies by ``down``, the second one adds
``up`` times that to the outputs. The sort is that of the mixture of experts, so the host waits for
nothing. The sizes of blocks depend on the layer alone, and no sum is split: a row has the same bits
in every batch. The sizes are estimates; not yet measured on a GPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from radixrt_kernels.triton.launching import block_of
from radixrt_kernels.triton.moe import Routing, route

PANEL = 16
"""Ranks are padded with zeros to a multiple of it: the least that a tensor core multiplies by."""
ROWS = 16
"""Rows of a block."""


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    hidden, down, between, sorted_rows, block_adapters, num_blocks,
    rows, merged, columns, hidden_stride,
    PAIRS_A_ROW: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """Compute one block of ``between[place of row] = down[adapter of row] @ hidden[row //
    PAIRS_A_ROW]``."""
    block = tl.program_id(1)
    if block < tl.load(num_blocks):
        adapter = tl.load(block_adapters + block).to(tl.int64)
        place = block * ROWS + tl.arange(0, ROWS)
        row = tl.load(sorted_rows + place)
        real = row < rows
        out = tl.program_id(0) * OUT + tl.arange(0, OUT)
        inner = tl.arange(0, IN)
        hidden_at = (
            hidden + (row // PAIRS_A_ROW).to(tl.int64)[:, None] * hidden_stride + inner[None, :]
        )
        # Outputs after the last one read the first ones again, and are not written.
        down_at = down + (adapter * merged + out % merged)[None, :] * columns + inner[:, None]
        sums = tl.zeros((ROWS, OUT), tl.float32)
        for start in range(0, columns, IN):
            if WHOLE:
                x = tl.load(hidden_at, mask=real[:, None], other=0.0)
                w = tl.load(down_at)
            else:
                inside = start + inner < columns
                x = tl.load(hidden_at, mask=real[:, None] & inside[None, :], other=0.0)
                w = tl.load(down_at, mask=inside[:, None], other=0.0)
            sums = tl.dot(x, w, sums, input_precision="ieee")
            hidden_at += IN
            down_at += IN
        between_at = between + place.to(tl.int64)[:, None] * merged + out[None, :]
        tl.store(between_at, sums, mask=real[:, None] & (out < merged)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    between, up, ranks, widths, factors, output, sorted_rows, block_adapters, num_blocks,
    rows, size, output_stride,
    WEIGHTED: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    PANEL: tl.constexpr,
):  # fmt: skip
    """Add ``up[adapter of row] @ between[place of row]`` to one block of the output. Parts for
    which the adapter has nothing stay as they are, signs of zeros and all."""
    block = tl.program_id(1)
    if block < tl.load(num_blocks):
        adapter = tl.load(block_adapters + block).to(tl.int64)
        place = block * ROWS + tl.arange(0, ROWS)
        row = tl.load(sorted_rows + place)
        real = row < rows
        begin = tl.program_id(0) * OUT
        out = begin + tl.arange(0, OUT)
        panel = tl.arange(0, PANEL)
        sums = tl.zeros((ROWS, OUT), tl.float32)
        changed = out < 0
        first = 0
        for part in tl.static_range(PARTS):
            last = first + tl.load(widths + part)
            rank = tl.load(ranks + adapter * PARTS + part)
            if (rank > 0) & (begin < last) & (begin + OUT > first):
                inside = (out >= first) & (out < last)
                changed = changed | inside
                for start in range(0, RANK, PANEL):
                    inner = start + panel
                    between_at = (
                        between
                        + place.to(tl.int64)[:, None] * (PARTS * RANK)
                        + part * RANK
                        + inner[None, :]
                    )
                    x = tl.load(between_at, mask=real[:, None], other=0.0)
                    up_at = up + (adapter * size + out)[None, :] * RANK + inner[:, None]
                    w = tl.load(up_at, mask=inside[None, :], other=0.0).to(tl.float32)
                    sums = tl.dot(x, w, sums, input_precision="ieee")
            first = last
        if WEIGHTED:
            sums *= tl.load(factors + row, mask=real, other=0.0)[:, None]
        output_at = output + row.to(tl.int64)[:, None] * output_stride + out[None, :]
        mask = real[:, None] & changed[None, :]
        sums += tl.load(output_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(output_at, sums.to(output.dtype.element_ty), mask=mask)


def group_rows(adapters: torch.Tensor, count: int) -> Routing:
    """Sort rows by adapter.

    Args:
        adapters: int64 [n], the adapter of each row; ``count``: none
        count: number of adapters
    """
    return route(adapters.unsqueeze(1), count, ROWS)


def pack_down(weight: torch.Tensor) -> torch.Tensor:
    """The ``down`` of all parts, [parts * rank, columns], as it is."""
    return weight


def pack_up(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The ``up`` of each part, [rows of the part, rank], below one another."""
    return torch.cat(list(weights))


def add_lora_(
    hidden: torch.Tensor,
    groups: Routing,
    down: torch.Tensor,
    up: torch.Tensor,
    rank: int,
    ranks: torch.Tensor,
    widths: torch.Tensor,
    output: torch.Tensor,
    places: None = None,
    factors: torch.Tensor | None = None,
) -> None:
    """Add the products of the rows' adapters to the outputs of a linear layer, in place.

    Args:
        hidden: [rows, columns], the layer's input; or a row for as many consecutive rows of
            ``output`` as that has more
        groups: of :func:`group_rows`
        down: a stack of :func:`pack_down` of all adapters
        up: a stack of :func:`pack_up` of all adapters, of the same dtype
        rank: columns of an ``up``, a multiple of PANEL
        ranks: int32 [adapters, parts]; 0: the adapter has nothing for this part, which stays as it is
        widths: int32 [parts], output features of each part
        output: [rows, sum of widths]
        places: not for these kernels, whose rows are in order
        factors: float32 [rows], of what is added to each; None: 1

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    rows, size = output.shape
    merged, columns = down.shape[1:]
    parts = ranks.shape[1]
    if rows == 0:
        return
    fits = hidden.shape[1] == columns and rows % len(hidden) == 0 and merged == parts * rank
    if not fits or up.shape[1:] != (size, rank) or rank % PANEL:
        raise ValueError(
            f"an adapter of [{merged}, {columns}] and {list(up.shape[1:])} does not fit {list(hidden.shape)} and {list(output.shape)}"
        )
    if not hidden.dtype == output.dtype == down.dtype == up.dtype:
        raise ValueError("hidden, output and adapters must be of one dtype")
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    if output.stride(1) != 1:
        raise ValueError("the rows of the output must be without gaps")
    between = torch.empty(
        groups.max_blocks * ROWS, merged, dtype=torch.float32, device=hidden.device
    )
    inner, out = max(16, block_of(columns, 128)), max(16, block_of(merged, 64))
    sorting = groups.sorted_pairs, groups.block_experts, groups.num_blocks
    _down_kernel[(triton.cdiv(merged, out), groups.max_blocks)](
        hidden, down, between, *sorting, rows, merged, columns, hidden.stride(0),
        PAIRS_A_ROW=rows // len(hidden), WHOLE=columns % inner == 0, ROWS=ROWS, OUT=out, IN=inner,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    out = max(16, block_of(size, 64))
    _up_kernel[(triton.cdiv(size, out), groups.max_blocks)](
        between, up, ranks, widths, between if factors is None else factors, output, *sorting,
        rows, size, output.stride(0),
        WEIGHTED=factors is not None, PARTS=parts, RANK=rank, ROWS=ROWS, OUT=out, PANEL=PANEL,
        num_warps=4, num_stages=2,
    )  # fmt: skip
