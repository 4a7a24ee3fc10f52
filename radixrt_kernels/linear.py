"""Linear layers with packed weights; a small number of tokens reads the weights at memory
bandwidth.

A packed matrix has panels of 16 output features (``PANEL``). The last panel is padded with zeros.
In a panel the input features are consecutive, in bfloat16 in pairs, as AVX-512's dot products need
them. All instruction sets use this form.
"""

import torch
import torch.nn.functional as F

from radixrt_kernels import native, trace
from radixrt_kernels.memory import advise_huge_pages

PANEL = 16

if native is not None:
    _linear, _grouped_linear, _look_up = native.linear, native.grouped_linear, native.look_up
    _linear_by_head = native.linear_by_head


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack ``weight`` [rows, columns] (float32, bfloat16 or float16) for the kernels.

    Returns:
        [panels, columns, PANEL], in bfloat16 [panels, ceil(columns / 2), PANEL, 2]; panels =
        ceil(rows / PANEL)
    """
    return pack_stack(weight.unsqueeze(0))[0]


def pack_stack(weights: torch.Tensor) -> torch.Tensor:
    """Pack each matrix of ``weights`` [count, rows, columns]. Returns the shape of :func:`pack`
    with ``count`` in front."""
    group = 2 if weights.dtype == torch.bfloat16 else 1
    count, rows, columns = weights.shape
    panels, steps = -(-rows // PANEL), -(-columns // group)
    packed = weights.new_empty((count, panels, steps, PANEL, group))
    advise_huge_pages(packed)  # reading pages of 4 KiB is a tenth slower
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
    hidden: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply tokens by a packed matrix.

    Args:
        hidden: [num_tokens, columns], float32, bfloat16 or float16
        weights: a matrix packed by :func:`pack`, of the same dtype
        rows: number of rows of the unpacked matrix
        bias: [rows] of the same dtype, or None
        output_dtype: None: that of ``hidden``; or float32, in which sums are not rounded
        output: the result is written there, which may be columns of a wider tensor; None: it is
            allocated

    Returns:
        [num_tokens, rows] of the same dtype, or of ``output_dtype``. Products are summed in float32
        and rounded once, with the bias.

    Raises:
        ValueError: the shapes or dtypes do not fit.

    Example:
        >>> import torch
        >>> hidden, weight = torch.randn(5, 48), torch.randn(100, 48)
        >>> output = linear(hidden, pack(weight), rows=100)
        >>> output.shape
        torch.Size([5, 100])
        >>> torch.allclose(output, hidden @ weight.T, atol=1e-4)
        True
    """
    if output is None:
        output = hidden.new_empty((hidden.shape[0], rows), dtype=output_dtype)
    trace.call(_linear, hidden, weights, rows, bias, output)
    return output


def grouped_linear(
    hidden: torch.Tensor,
    tokens: torch.Tensor | None,
    starts: torch.Tensor,
    weights: torch.Tensor,
    rows: int,
    bias: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each input row by one matrix of a packed stack.

    Args:
        hidden: [num_tokens, columns] of the weights' dtype
        tokens: int32 [n], the token of each input row; None: the rows of ``hidden``
        starts: int32 [matrices + 1]; rows ``starts[i]`` to ``starts[i + 1]`` are multiplied by
            matrix ``i``
        weights: a stack packed by :func:`pack_stack`
        rows: number of rows of each unpacked matrix
        bias: [matrices, rows] of the same dtype, or None
        output: as of :func:`linear`

    Returns:
        [n, rows] of the same dtype
    """
    if output is None:
        output = hidden.new_empty((len(hidden) if tokens is None else len(tokens), rows))
    trace.call(_grouped_linear, hidden, tokens, starts, weights, rows, output, bias)
    return output


def linear_by_head(
    hidden: torch.Tensor, weights: torch.Tensor, rows: int, output: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each head of each token by the head's own matrix of a packed stack.

    Args:
        hidden: [num_tokens, heads, columns] of the weights' dtype; may be a view
        weights: a stack packed by :func:`pack_stack`
        rows: number of rows of each unpacked matrix
        output: [num_tokens, heads, rows] of the same dtype, perhaps a view; None: a new tensor

    Returns:
        [num_tokens, heads, rows] of the same dtype

    Example:
        >>> import torch
        >>> stack = pack_stack(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]))  # two matrices [1, 2]
        >>> linear_by_head(torch.ones(1, 2, 2), stack, rows=1).tolist()
        [[[3.0], [7.0]]]
    """
    if output is None:
        output = hidden.new_empty((*hidden.shape[:2], rows))
    trace.call(_linear_by_head, hidden, weights, rows, output)
    return output


def look_up(weights: torch.Tensor, rows: int, columns: int, wanted: torch.Tensor) -> torch.Tensor:
    """Return the rows ``wanted`` ([n] int64) of a packed [rows, columns] matrix: [n, columns]."""
    output = weights.new_empty((wanted.shape[0], columns))
    trace.call(_look_up, weights, rows, wanted, output)
    return output
