"""Low-rank adapters of linear layers: each token has the adapter of its sequence, or none.

An adapter of a projection is two matrices, ``down`` [rank, columns] and ``up`` [rows, rank]; the
projection's output gets ``up @ down @ hidden`` added. Projections of the same input that are merged
into one matrix are its *parts*: their ``down`` are below each other, each padded with zeros to the
rank of the stack. What is between the two products stays in float32 and an output is rounded once,
after the sum, so the bits of a token do not depend on the batch.
"""

import torch

from radixrt_kernels import linear, mixture, native, trace

PANEL = linear.PANEL

if native is not None:
    _add_lora = native.add_lora


def group_rows(adapters: torch.Tensor, count: int) -> mixture.Groups:
    """Sort rows by adapter.

    Args:
        adapters: int64 [n], the adapter of each row; ``count``: none
        count: number of adapters
    """
    return mixture.group_by_expert(adapters.unsqueeze(1), count + 1)


def pack_down(weight: torch.Tensor) -> torch.Tensor:
    """Pack the ``down`` of all parts, [parts * rank, columns], as :func:`radixrt_kernels.linear.pack`
    does."""
    return linear.pack(weight)


def pack_up(weights: list[torch.Tensor]) -> torch.Tensor:
    """Pack the ``up`` of each part, [rows of the part, rank].

    Returns:
        [panels of all parts, rank, PANEL]; the last panel of each part is padded with zeros.
    """
    panels = []
    for weight in weights:
        rows, rank = weight.shape
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -rows % PANEL))
        panels.append(padded.view(-1, PANEL, rank).transpose(1, 2))
    return torch.cat(panels).contiguous()


def add_lora_(
    hidden: torch.Tensor,
    groups: mixture.Groups,
    down: torch.Tensor,
    up: torch.Tensor,
    rank: int,
    ranks: torch.Tensor,
    widths: torch.Tensor,
    output: torch.Tensor,
    places: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> None:
    """Add the products of the rows' adapters to the outputs of a linear layer, in place.

    Args:
        hidden: [rows, columns] of the weights' dtype, the layer's input
        groups: of :func:`group_rows`
        down: a stack of :func:`pack_down` of all adapters
        up: a stack of :func:`pack_up` of all adapters
        rank: columns of an ``up``, a multiple of PANEL
        ranks: int32 [adapters, parts]; 0: the adapter has nothing for this part, which stays as it is
        widths: int32 [parts], output features of each part
        output: [rows, sum of widths] of the same dtype
        places: int32 [n], the row of each element of ``groups``; None: they are in order
        factors: not for these kernels, which must get None

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    assert factors is None, "results of experts are weighted later"
    rows = groups.tokens
    if places is not None:
        rows = places.flatten()[rows]
        if len(hidden) < len(rows):  # pairs of other ranks have no row
            rows = rows.clamp(max=len(hidden) - 1)
    trace.call(_add_lora, hidden, rows, groups.starts, down, up, rank, ranks, widths, output)
