"""Compares each kernel with its reference on this machine, for ``python -m radixrt_kernels``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from radixrt_kernels import (
    activation,
    blockwise,
    groupwise,
    linear,
    mixture,
    norm,
    recurrence,
    rotary,
    sampler,
)
from radixrt_kernels.attention import AttentionPlan
from radixrt_kernels.reference import blockwise as reference_blockwise
from radixrt_kernels.reference import groupwise as reference_groupwise
from radixrt_kernels.reference import linear as reference_linear
from radixrt_kernels.reference import mixture as reference_mixture
from radixrt_kernels.reference import norm as reference_norm
from radixrt_kernels.reference import recurrence as reference_recurrence
from radixrt_kernels.reference.activation import gated_activation
from radixrt_kernels.reference.attention import paged_attention
from radixrt_kernels.reference.rotary import rotated


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a kernel with its reference."""

    name: str
    result: torch.Tensor
    expected: torch.Tensor
    tolerance: float
    """Largest difference allowed, relative to the largest expected value."""

    @property
    def error(self) -> float:
        """Largest difference, relative to the largest expected value."""
        expected = self.expected.double()
        return float((self.result.double() - expected).abs().max() / expected.abs().max())

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False for NaN


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Tolerance per dtype for one rounding and a different order of summation."""

FEW_AND_MANY = (7, 40)
"""Numbers of tokens; linear layers use different code paths for few and many tokens."""


GGUF_BLOCKS = {
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176),
    14: (256, 210), 16: (256, 66), 17: (256, 74), 18: (256, 98), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 39: (32, 17)
}  # fmt: skip
"""Columns and bytes of a block, by kind."""


def activations() -> Iterator[Check]:
    for dtype, tolerance in ROUNDING.items():
        gate_up = torch.randn(5, 2 * 123).to(dtype)
        for name in ("silu", "gelu", "gelu_tanh"):
            result = activation.gated_activation(gate_up, name)
            yield Check(f"{name} {dtype}", result, gated_activation(gate_up, name), tolerance)
    logits = torch.randn(5, 123)
    expected = 0.5 * torch.tanh(logits.double() / 0.5)
    yield Check("soft_cap", activation.soft_cap_(logits, 0.5), expected, 1e-5)


def attention() -> Iterator[Check]:
    """A decode of two sequences and a prefill, on pages in random order."""
    qo_indptr = torch.tensor([0, 1, 2, 42], dtype=torch.int32)
    kv_indptr = torch.tensor([0, 40, 60, 67], dtype=torch.int32)
    last_page_len = torch.tensor([16, 3, 9], dtype=torch.int32)
    kv_indices = torch.randperm(67).int()
    slots = [int(kv_indices[39]) * 16 + 15, int(kv_indices[59]) * 16 + 2]
    slots += [int(kv_indices[60 + p // 16]) * 16 + p % 16 for p in range(65, 105)]
    kv_slots = torch.tensor(slots)
    plan = AttentionPlan(qo_indptr, kv_indptr, last_page_len, kv_indices, kv_slots, 16)
    for dtype, tolerance in ROUNDING.items():
        for head_dim in (64, 80, 128):
            query, key, value = (torch.randn(42, heads, head_dim).to(dtype) for heads in (6, 2, 2))
            keys, values = (torch.randn(67, 16, 2, head_dim).to(dtype) for _ in range(2))
            result = plan.attend(query, key, value, keys, values, head_dim**-0.5)
            layout = (qo_indptr, kv_indptr, last_page_len, kv_indices)
            expected = paged_attention(query, keys, values, *layout, head_dim**-0.5)
            yield Check(f"attention {dtype}, head_dim {head_dim}", result, expected, tolerance)


def norms() -> Iterator[Check]:
    for dtype, tolerance in ROUNDING.items():
        hidden, weight = torch.randn(5, 123).to(dtype), torch.randn(123).to(dtype)
        expected = reference_norm.rms_norm(hidden, weight, 1e-6)
        yield Check(f"rms_norm {dtype}", norm.rms_norm(hidden, weight, 1e-6), expected, tolerance)
        residual = torch.randn(5, 123).to(dtype)
        expected = reference_norm.rms_norm(hidden + residual, weight, 1e-6, unit_offset=True)
        norm.add_rms_norm_(hidden, residual, weight, 1e-6, unit_offset=True)
        yield Check(f"add_rms_norm {dtype}, unit_offset", hidden, expected, tolerance)


def rotation() -> Iterator[Check]:
    angles = torch.randn(50, 20)
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), dim=1), torch.randint(0, 50, (9,))
    for dtype, tolerance in ROUNDING.items():
        query, key = torch.randn(9, 6, 64).to(dtype), torch.randn(9, 2, 64).to(dtype)
        expected = rotated(query, positions, cos_sin)
        rotary.rotate_(positions, query, key, cos_sin)
        yield Check(f"rotate {dtype}, 40 of 64 features", query, expected, tolerance)


def linears() -> Iterator[Check]:
    for dtype, tolerance in ROUNDING.items():
        weight = torch.randn(75, 123).to(dtype)
        packed = linear.pack(weight)
        for tokens in FEW_AND_MANY:
            hidden = torch.randn(tokens, 123).to(dtype)
            expected = reference_linear.linear(hidden, packed, 75)
            result = linear.linear(hidden, packed, 75)
            yield Check(f"linear {dtype}, {tokens} tokens", result, expected, tolerance)


def groupwise_linears() -> Iterator[Check]:
    for bits, group_size in ((8, 200), (4, 64)):
        groups = -(-200 // group_size)
        codes, zeros = (
            torch.randint(0, 1 << bits, (75, count), dtype=torch.uint8) for count in (200, groups)
        )
        matrix = groupwise.pack(codes, torch.rand(75, groups).half(), zeros, bits, group_size)
        for dtype, tolerance in ROUNDING.items():
            for tokens in FEW_AND_MANY:
                hidden = torch.randn(tokens, 200).to(dtype)
                expected = reference_groupwise.linear(hidden, matrix)
                result = groupwise.linear(hidden, matrix)
                name = f"linear {dtype}, {bits} bits, {tokens} tokens"
                yield Check(name, result, expected, tolerance)


def blockwise_linears() -> Iterator[Check]:
    """Random bytes are valid blocks; without bit 6, their scales are finite numbers."""
    for kind, (columns, num_bytes) in GGUF_BLOCKS.items():
        row_bytes = 512 // columns * num_bytes
        blocks = torch.randint(0, 256, (75, row_bytes), dtype=torch.uint8) & 0xBF
        matrix = blockwise.pack(blocks, kind, 75, 512)
        weights = reference_blockwise.dequantize(matrix)
        result = blockwise.look_up(matrix, torch.arange(75), torch.float32)
        yield Check(f"look_up of GGUF's kind {kind}", result, weights, 0.0)
        for tokens in (1, 5, *FEW_AND_MANY):
            hidden = torch.randn(tokens, 512)
            expected = reference_blockwise.linear(hidden, [matrix])
            result = blockwise.linear(hidden, [matrix])
            yield Check(f"linear of GGUF's kind {kind}, {tokens} tokens", result, expected, 1e-5)


def mixtures() -> Iterator[Check]:
    """Seven tokens with three of five experts each."""
    for dtype, tolerance in ROUNDING.items():
        logits, hidden = torch.randn(7, 5).to(dtype), torch.randn(7, 123).to(dtype)
        weights, experts = mixture.choose_experts(logits, 3, normalize=True)
        expected, _ = reference_mixture.choose_experts(logits, 3, normalize=True)
        yield Check(f"choose_experts {dtype}", weights, expected, 1e-5)
        groups = mixture.group_by_expert(experts, 5)
        packed = linear.pack_stack(torch.randn(5, 75, 123).to(dtype))
        arguments = (hidden, groups.tokens, groups.starts, packed, 75)
        values = linear.grouped_linear(*arguments)
        by_each = reference_linear.grouped_linear(*arguments)
        yield Check(f"grouped_linear {dtype}", values, by_each, tolerance)
        result = mixture.weighted_sum(values, groups.places, weights)
        expected = reference_mixture.weighted_sum(values, groups.places, weights)
        yield Check(f"weighted_sum {dtype}", result, expected, tolerance)


def recurrences() -> Iterator[Check]:
    """Two sequences, one of a single token, with a copy of a state on the way."""
    columns = ([0, 1, 12], [2, 0], [0, 0, 1], [5], [1])
    step = tuple(torch.tensor(column, dtype=torch.int32) for column in columns)
    for dtype, tolerance in ROUNDING.items():
        inputs, rate = torch.randn(12, 72).to(dtype), -torch.rand(3)
        weight, last = torch.randn(4, 72).to(dtype), torch.randn(3, 3, 72).to(dtype)
        query, key = (torch.randn(12, 1, 40).to(dtype) for _ in range(2))
        value, gates = torch.randn(12, 3, 24).to(dtype), torch.randn(2, 12, 3).to(dtype)
        matrices, bias = torch.randn(3, 3, 40, 24), torch.randn(3)
        results = []
        for functions in (recurrence, reference_recurrence):
            convolved, *scanned = torch.empty_like(inputs), *torch.empty(2, *value.shape).to(dtype)
            functions.short_convolution(
                inputs, None, None, weight, None, True, convolved, last.clone(), step
            )
            key_value = (query, key, value)
            functions.gated_delta_rule(
                *key_value, *gates, rate, bias, True, scanned[0], matrices.clone(), step
            )
            functions.state_space_scan(
                *key_value,
                gates[0],
                rate,
                bias,
                bias,
                (0.0, 1.0),
                scanned[1],
                matrices.clone(),
                step,
            )
            gated = functions.gated_norm(value, value, None, 1e-6, gate_first=True)
            results.append([convolved, *scanned, gated])
        names = ("short_convolution", "gated_delta_rule", "state_space_scan", "gated_norm")
        for name, result, expected in zip(names, *results, strict=True):
            yield Check(f"{name} {dtype}", result, expected, tolerance)


def sampling() -> Iterator[Check]:
    """Greedy sampling and log-probabilities. ``tests/kernels/test_sampler_kernel.py`` tests the
    other settings."""
    logits = torch.randn(5, 1000)
    settings = torch.zeros(5, 6, dtype=torch.int32)
    settings[:, 1] = 1000
    found, _ = sampler.draw_tokens(logits, settings, torch.zeros(5, dtype=torch.int64))
    yield Check("sample, greedy", found, logits.argmax(-1), 0.0)
    yield Check("log_sum_exp", sampler.log_sum_exp(logits), logits.double().logsumexp(-1), 1e-5)
    odd = torch.full((5, 32), -0x55555556, dtype=torch.int32)  # bits 1, 3, ...: every second token
    kept = sampler.log_kept_mass(logits, torch.arange(5), odd)
    expected = logits.double().softmax(-1)[:, 1::2].sum(-1).log()
    yield Check("log_kept_mass", kept, expected, 1e-5)


CHECKS: list[Callable[[], Iterator[Check]]] = [
    activations,
    norms,
    rotation,
    attention,
    linears,
    groupwise_linears,
    blockwise_linears,
    mixtures,
    recurrences,
    sampling,
]
"""One function per kernel family."""
