"""Linear layers whose matrix is packed once, so that computing a few tokens streams it at the memory's speed.

A packed matrix is panels of 16 output features (``PANEL``), the last filled up with zeros; in a panel the input features
follow each other, in bfloat16 by pairs, as AVX-512's dot products want them. All instruction sets share the form.
"""

import torch
import torch.nn.functional as F

from radixrt_kernels import native, tape
from radixrt_kernels.memory import advise_huge_pages

PANEL = 16

if native is not None:
    _linear, _grouped_linear, _look_up = native.linear, native.grouped_linear, native.look_up


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The packed form of ``weight`` [rows, columns].

    Returns:
        [panels, columns, PANEL], or in bfloat16 [panels, ceil(columns / 2), PANEL, 2]
    """
    return pack_stack(weight.unsqueeze(0))[0]


def pack_stack(weights: torch.Tensor) -> torch.Tensor:
    """The packed form of each of some matrices [count, rows, columns], with ``count`` as its first dimension."""
    group = 2 if weights.dtype == torch.bfloat16 else 1
    count, rows, columns = weights.shape
    panels, steps = -(-rows // PANEL), -(-columns // group)
    packed = weights.new_empty((count, panels, steps, PANEL, group))
    advise_huge_pages(packed)  # a stream of pages of 4 KiB loses a tenth at their borders
    whole = rows // PANEL
    for weight, place in zip(weights, packed, strict=True):
        place[:whole] = _panels(weight[: whole * PANEL], steps, group)
        if whole < panels:
            last = F.pad(weight[whole * PANEL :], (0, 0, 0, -rows % PANEL))
            place[whole:] = _panels(last, steps, group)
    return packed if group == 2 else packed.squeeze(-1)


def _panels(weight: torch.Tensor, steps: int, group: int) -> torch.Tensor:
    """[panels * PANEL, columns] -> [panels, steps, PANEL, group]"""
    if weight.shape[1] % group:
        weight = F.pad(weight, (0, 1))
    return weight.view(-1, PANEL, steps, group).transpose(1, 2)


def linear(
    hidden: torch.Tensor, weights: torch.Tensor, rows: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """[num_tokens, columns] times a packed matrix of ``rows`` rows -> [num_tokens, rows].

    All are of one dtype. Products are summed in float32 and rounded once, bias included.
    """
    output = hidden.new_empty((hidden.shape[0], rows))
    tape.call(_linear, hidden, weights, rows, bias, output)
    return output


def grouped_linear(
    hidden: torch.Tensor,
    tokens: torch.Tensor | None,
    starts: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """Each row of inputs times its own matrix of a packed stack, whose matrices have ``rows`` rows.

    Args:
        hidden: [num_tokens, columns] of the weights' dtype
        tokens: int32 [n], the token that each row of inputs is; None: the rows of ``hidden`` as they are.
        starts: int32 [matrices + 1]; rows ``starts[i]`` to ``starts[i + 1]`` are multiplied by matrix ``i``.

    Returns:
        [n, rows]
    """
    count = len(hidden) if tokens is None else len(tokens)
    output = hidden.new_empty((count, rows))
    tape.call(_grouped_linear, hidden, tokens, starts, weights, rows, output)
    return output


def look_up(weights: torch.Tensor, rows: int, columns: int, wanted: torch.Tensor) -> torch.Tensor:
    """Some rows of a packed [rows, columns] matrix: [n] int64 -> [n, columns]"""
    output = weights.new_empty((wanted.shape[0], columns))
    tape.call(_look_up, weights, rows, wanted, output)
    return output
