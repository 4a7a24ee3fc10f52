"""Recurrent layers token by token, for each sequence alone; see ``radixrt_kernels.recurrence``."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

Step = Sequence[torch.Tensor]


def _for_each_token(
    states: torch.Tensor, step: Step, advance: Callable[[int, torch.Tensor], torch.Tensor]
) -> None:
    """Set the states to those behind the step: ``advance`` gives that behind a token from the one
    before it."""
    indptr, rows, keep_indptr, keep_ends, keep_rows = (tensor.tolist() for tensor in step)
    for i, row in enumerate(rows):
        keeps = slice(keep_indptr[i], keep_indptr[i + 1])
        kept = dict(zip(keep_ends[keeps], keep_rows[keeps], strict=True))
        state = states[row].clone()
        for token in range(indptr[i], indptr[i + 1]):
            state = advance(token, state)
            if token + 1 in kept:
                states[kept[token + 1]] = state
        states[row] = state


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
    x = inputs if before is None else inputs * before

    def advance(token: int, state: torch.Tensor) -> torch.Tensor:
        window = torch.cat([state, x[token : token + 1]])
        output = (window.float() * weight.float()).sum(0)
        if bias is not None:
            output = output + bias.float()
        output = (F.silu(output) if silu else output).to(outputs.dtype)
        outputs[token] = output if after is None else output * after[token]
        return window[1:]

    _for_each_token(states, step, advance)


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
    query, key = (_per_value_head(x, value, tiled) for x in (query, key))
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    decay = (rate * F.softplus(decay_gate.float() + dt_bias)).exp()[..., None, None]
    gain = gain_gate.float().sigmoid()[..., None]

    def advance(token: int, state: torch.Tensor) -> torch.Tensor:
        state = state * decay[token]
        known = torch.einsum("hkv,hk->hv", state, key[token])
        added = gain[token] * (value[token].float() - known)
        state = state + key[token][..., None] * added[:, None]
        outputs[token] = torch.einsum("hkv,hk->hv", state, query[token]).to(outputs.dtype)
        return state

    _for_each_token(states, step, advance)


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
    query, key = (_per_value_head(x, value) for x in (query, key))
    gain = F.softplus(dt.float() + dt_bias).clamp(*dt_limit)
    decay = (rate * gain).exp()[..., None, None]

    def advance(token: int, state: torch.Tensor) -> torch.Tensor:
        x = value[token].float()
        added = (gain[token][:, None] * x)[:, None]
        state = decay[token] * state + key[token][..., None] * added
        output = torch.einsum("hkv,hk->hv", state, query[token])
        outputs[token] = (output + skip[:, None] * x).to(outputs.dtype)
        return state

    _for_each_token(states, step, advance)


def _per_value_head(heads: torch.Tensor, value: torch.Tensor, tiled: bool = False) -> torch.Tensor:
    count = value.shape[1] // heads.shape[1]
    if tiled:
        return heads.float().repeat(1, count, 1)
    return heads.float().repeat_interleave(count, dim=1)


def gated_norm(
    rows: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    gate_first: bool,
) -> torch.Tensor:
    x, gate = rows.float(), F.silu(gate.float())
    if gate_first or weight is None:
        x = x * gate
    if weight is None:
        return x.to(rows.dtype)
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(rows.dtype) * weight
    return x if gate_first else (x * gate).to(rows.dtype)
