"""Low-rank adapters of linear layers: each token has the adapter of its sequence, or none.

An adapter of a projection is two matrices, ``down`` [rank, columns] and ``up`` [rows, rank]; the
projection's output gets ``up @ down @ hidden`` added. Projections of the same input that are merged
into one matrix are its *parts*: their ``down`` are below each other, each padded with zeros to the
rank of the stack. What is between the two products stays in float32 and an output is rounded once,
after the sum, so the bits of a token do not depend on the batch.
"""

import torch

from radixrt_kernels import linear, native, tape

PANEL = linear.PANEL

if native is not None:
    _add_lora = native.add_lora


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
    tokens: torch.Tensor,
    starts: torch.Tensor,
    down: torch.Tensor,
    up: torch.Tensor,
    rank: int,
    ranks: torch.Tensor,
    widths: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Add the products of the tokens' adapters to the outputs of a linear layer, in place.

    Args:
        hidden: [num_tokens, columns] of the weights' dtype, the layer's input
        tokens: int32 [n], the tokens sorted by adapter; those behind the last adapter have none
        starts: int32 [more than adapters]; ``tokens[starts[i] : starts[i + 1]]`` have adapter ``i``
        down: a stack of :func:`pack_down` of all adapters
        up: a stack of :func:`pack_up` of all adapters
        rank: columns of an ``up``, a multiple of PANEL
        ranks: int32 [adapters, parts]; 0: the adapter has nothing for this part, which stays as it is
        widths: int32 [parts], output features of each part
        output: [num_tokens, sum of widths] of the same dtype

    Raises:
        ValueError: the shapes or dtypes do not fit.
    """
    tape.call(_add_lora, hidden, tokens, starts, down, up, rank, ranks, widths, output)
