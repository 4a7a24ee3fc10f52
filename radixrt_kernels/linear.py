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
    _linear, _look_up = native.linear, native.look_up


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The packed form of ``weight`` [rows, columns].

    Returns:
        [panels, columns, PANEL], or in bfloat16 [panels, ceil(columns / 2), PANEL, 2]
    """
    group = 2 if weight.dtype == torch.bfloat16 else 1
    rows, columns = weight.shape
    panels, steps = -(-rows // PANEL), -(-columns // group)
    packed = weight.new_empty((panels, steps, PANEL, group))
    advise_huge_pages(packed)  # a stream of pages of 4 KiB loses a tenth at their borders
    whole = rows // PANEL
    packed[:whole] = _panels(weight[: whole * PANEL], steps, group)
    if whole < panels:
        last = F.pad(weight[whole * PANEL :], (0, 0, 0, -rows % PANEL))
        packed[whole:] = _panels(last, steps, group)
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


def look_up(weights: torch.Tensor, rows: int, columns: int, wanted: torch.Tensor) -> torch.Tensor:
    """Some rows of a packed [rows, columns] matrix: [n] int64 -> [n, columns]"""
    output = weights.new_empty((wanted.shape[0], columns))
    tape.call(_look_up, weights, rows, wanted, output)
    return output
