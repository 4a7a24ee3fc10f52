"""The recurrences of hybrid models, and for comparison the matrix products of a layer that has
one."""

from collections.abc import Iterator
from typing import Any

import torch

from bench.kernels.machine import Case
from radixrt_kernels import linear, recurrence
from radixrt_kernels.reference import recurrence as reference

DTYPE = torch.bfloat16
TOKENS = (1, 16, 512)
KEYS, HEADS, SIZE, TAPS = 16, 16, 128, 4
"""Of a gated delta net of Qwen3.5-0.8B: heads of keys and of values, and features of each."""
HIDDEN, MLP = 1024, 3584
MAMBA_HEADS, HEAD_DIM, STATE = 48, 64, 128
"""Of a Mamba 2 layer of Granite 4 H Tiny."""


def cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield _convolution(tokens)
        yield _delta_rule(tokens)
        yield _state_space(tokens)
        yield _products(tokens)


def _step(tokens: int) -> tuple[torch.Tensor, ...]:
    """One prompt of 512 tokens; or a decode of as many sequences."""
    lengths = [tokens] if tokens > 16 else [1] * tokens
    indptr = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows, none = list(range(len(lengths))), list[int]()
    columns = (indptr, rows, [0] * len(indptr), none, none)
    return tuple(torch.tensor(column, dtype=torch.int32) for column in columns)


def _case(name: str, function: str, arguments: tuple[Any, ...], states: torch.Tensor, tokens: int, operations: float) -> Case:  # fmt: skip
    step = _step(tokens)
    read = sum(t.nbytes for t in arguments if isinstance(t, torch.Tensor))
    few = (*(t[:1] if isinstance(t, torch.Tensor) and len(t) == tokens else t for t in arguments),)
    return Case(
        name,
        lambda: getattr(recurrence, function)(*arguments, states, step),
        # token by token in Python: the time of one
        lambda: getattr(reference, function)(*few, states, _step(1)),
        num_bytes=read + 2 * states[: len(step[1])].nbytes,
        operations=operations,
        dtype=torch.float32,
        in_cache=True,
    )


def _convolution(tokens: int) -> Case:
    channels = 2 * KEYS * SIZE + HEADS * SIZE
    inputs = torch.randn(tokens, channels).to(DTYPE)
    weight, states = torch.randn(TAPS, channels).to(DTYPE), torch.zeros(16, TAPS - 1, channels).to(DTYPE)  # fmt: skip
    arguments = (inputs, None, None, weight, None, True, torch.empty_like(inputs))
    operations = 2 * TAPS * inputs.numel()
    return _case(f"short_convolution {tokens} x {channels}", "short_convolution", arguments, states, tokens, operations)  # fmt: skip


def _delta_rule(tokens: int) -> Case:
    query, key = (torch.randn(tokens, KEYS, SIZE).to(DTYPE) for _ in range(2))
    value, gates = torch.randn(tokens, HEADS, SIZE).to(DTYPE), torch.randn(2, tokens, HEADS).to(DTYPE)  # fmt: skip
    rate, bias, states = -0.05 * torch.rand(HEADS), torch.randn(HEADS), torch.zeros(16, HEADS, SIZE, SIZE)  # fmt: skip
    arguments = (query, key, value, *gates, rate, bias, False, torch.empty_like(value))
    operations = 7 * tokens * HEADS * SIZE * SIZE
    return _case(f"gated_delta_rule {tokens} x {HEADS} heads", "gated_delta_rule", arguments, states, tokens, operations)  # fmt: skip


def _state_space(tokens: int) -> Case:
    query, key = (torch.randn(tokens, 1, STATE).to(DTYPE) for _ in range(2))
    value, dt = torch.randn(tokens, MAMBA_HEADS, HEAD_DIM).to(DTYPE), torch.randn(tokens, MAMBA_HEADS).to(DTYPE)  # fmt: skip
    rate, bias, skip = -torch.rand(MAMBA_HEADS), torch.randn(MAMBA_HEADS), torch.ones(MAMBA_HEADS)
    states = torch.zeros(16, MAMBA_HEADS, STATE, HEAD_DIM)
    arguments = (query, key, value, dt, rate, bias, skip, (0.0, 1e9), torch.empty_like(value))
    operations = 5 * tokens * MAMBA_HEADS * HEAD_DIM * STATE
    return _case(f"state_space_scan {tokens} x {MAMBA_HEADS} heads", "state_space_scan", arguments, states, tokens, operations)  # fmt: skip


def _products(tokens: int) -> Case:
    """The products of one layer with a gated delta net: projections and MLP, as one matrix."""
    rows = 2 * KEYS * SIZE + 3 * HEADS * SIZE + 2 * HEADS + 3 * MLP
    weight, hidden = torch.randn(rows, HIDDEN).to(DTYPE), torch.randn(tokens, HIDDEN).to(DTYPE)
    packed = linear.pack(weight)
    return Case(
        f"products of a delta net layer {tokens} x {rows} x {HIDDEN}",
        lambda: linear.linear(hidden, packed, rows),
        lambda: torch.nn.functional.linear(hidden, weight),
        num_bytes=weight.nbytes,
        operations=2 * tokens * weight.numel(),
        dtype=DTYPE,
    )
