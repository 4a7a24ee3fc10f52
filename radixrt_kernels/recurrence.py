"""Recurrent layers over the states of sequences, in the order of the tokens: short convolutions,
gated delta rules, state space scans; and the gated norm behind them.

A state belongs to a sequence and is a row of a table. A *step* is five int32 tensors: sequence
``i`` has the tokens ``indptr[i]:indptr[i + 1]``, its state is row ``rows[i]``, which the step
advances, and behind the token before ``keep_ends[j]`` the state is copied to row ``keep_rows[j]``,
for ``j`` in ``keep_indptr[i]:keep_indptr[i + 1]``. The bits of outputs and states depend on the
tokens of their sequence alone: not on chunks, other sequences or threads.

A step changes between the replays of a tape. Therefore the functions with a step are not taped
here: their caller tapes a call that takes the step of its time.
"""

from collections.abc import Sequence

import torch

from radixrt_kernels import native, trace

if native is not None:
    _short_convolution = native.short_convolution
    _gated_delta_rule = native.gated_delta_rule
    _state_space_scan = native.state_space_scan
    _gated_norm = native.gated_norm

Step = Sequence[torch.Tensor]
"""(indptr, rows, keep_indptr, keep_ends, keep_rows)"""


def short_convolution(
    inputs: torch.Tensor,
    before: torch.Tensor | None,
    after: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    outputs: torch.Tensor,
    states: torch.Tensor,
    step: Step,
) -> None:
    """Convolve each channel causally: ``after * act(bias + sum(weight[k] * x[t - taps + 1 + k]))``
    of ``x = before * inputs``, rounded to the dtype of the inputs.

    Args:
        inputs, outputs: [num_tokens, channels], float32, bfloat16 or float16; rows may have gaps
        before, after: factors like the inputs; None: 1
        weight: [taps, channels], 2 to 4 taps, the newest input's last
        bias: [channels] or None
        silu: the activation is ``silu``; else there is none.
        states: [rows, taps - 1, channels] of the same dtype: the last ``x``, oldest first

    Raises:
        ValueError: shapes or the step do not fit.

    Example:
        >>> import torch
        >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> states, outputs = torch.zeros(2, 1, 1), torch.empty(3, 1)
        >>> step = (int32(0, 3), int32(0), int32(0, 1), int32(2), int32(1))
        >>> inputs, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[10.0], [1.0]])
        >>> short_convolution(inputs, None, None, weight, None, False, outputs, states, step)
        >>> outputs.flatten().tolist(), states.flatten().tolist()
        ([1.0, 12.0, 23.0], [3.0, 2.0])
    """
    _short_convolution(inputs, before, after, weight, bias, silu, outputs, states, *step)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay_gate: torch.Tensor,
    gain_gate: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    tiled: bool,
    outputs: torch.Tensor,
    states: torch.Tensor,
    step: Step,
) -> None:
    """Advance a matrix for each head by the gated delta rule (Yang et al., 2024): for each token
    ``S = decay * S; S += key (gain * (value - S^T key))^T; output = S^T query``.

    ``decay`` is ``exp(rate * softplus(decay_gate + dt_bias))`` and ``gain`` is
    ``sigmoid(gain_gate)``. Queries and keys are divided by their length, and queries by the root of
    their size. The state is float32.

    Args:
        query, key: [num_tokens, key_heads, key_dim], key_dim up to 256; float32, bfloat16 or
            float16; tokens may have gaps between them
        value, outputs: [num_tokens, heads, value_dim]; ``heads`` is a multiple of ``key_heads``
        decay_gate, gain_gate: [num_tokens, heads]
        rate, dt_bias: [heads] float32; rates are negative
        tiled: head ``h`` has the key ``h % key_heads`` (GGUF); else each key serves neighbouring
            heads.
        states: [rows, heads, key_dim, value_dim] float32

    Raises:
        ValueError: shapes or the step do not fit.
    """
    _gated_delta_rule(
        query, key, value, decay_gate, gain_gate, rate, dt_bias, tiled, outputs, states, *step
    )


def state_space_scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    dt_limit: tuple[float, float],
    outputs: torch.Tensor,
    states: torch.Tensor,
    step: Step,
) -> None:
    """Advance a matrix for each head by the recurrence of Mamba 2 (Dao & Gu, 2024), whose B is the
    key and C the query: for each token ``S = exp(rate * d) * S + key (d * value)^T; output = S^T
    query + skip * value``, with ``d = clamp(softplus(dt + dt_bias))``.

    Args:
        query, key: [num_tokens, groups, state_size], as in :func:`gated_delta_rule`
        value, outputs: [num_tokens, heads, head_dim]
        dt: [num_tokens, heads]
        rate, dt_bias, skip: [heads] float32
        dt_limit: smallest and largest ``d``
        states: [rows, heads, state_size, head_dim] float32

    Raises:
        ValueError: shapes or the step do not fit.
    """
    _state_space_scan(query, key, value, dt, rate, dt_bias, skip, *dt_limit, outputs, states, *step)


def gated_norm(
    rows: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    gate_first: bool,
) -> torch.Tensor:
    """Compute ``rms_norm(rows) * weight * silu(gate)``, or ``rms_norm(rows * silu(gate)) * weight``
    with ``gate_first``; without a weight ``rows * silu(gate)``.

    Args:
        rows, gate: [num_tokens, groups, size], float32, bfloat16 or float16; tokens may have gaps
        weight: [1 or groups, size], or None
        eps: added to the mean square

    Returns:
        a new tensor like the rows

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> import torch
        >>> rows, gate = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 1e9]]])
        >>> gated_norm(rows, gate, torch.ones(1, 2), 0.0, gate_first=False) / 1e9
        tensor([[[0.0000, 1.1314]]])
    """
    outputs = torch.empty(rows.shape, dtype=rows.dtype)
    trace.call(_gated_norm, rows, gate, weight, outputs, eps, gate_first)
    return outputs
