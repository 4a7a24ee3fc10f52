"""Steps of attention on the GPU, and how near a half-precision result has to come to the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from radixrt.attention.backend import AttentionSpec
from tests.attention.steps import Step, make_step

LLAMA = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=128, scale=128**-0.5)
"""Heads as Llama-3.1-8B groups them, four queries to a key."""

TOLERANCE = 1e-2
"""Largest error beside the largest number of the reference, in bfloat16."""


def make_steps(
    lengths: list[tuple[int, int]], page_size: int, spec: AttentionSpec = LLAMA
) -> tuple[Step, torch.Tensor]:
    """A step in bfloat16 on the GPU, of (new, all) tokens a sequence, and what the reference computes on the CPU."""
    step = make_step(lengths, page_size, spec, torch.bfloat16)
    caches = step.key_cache.clone(), step.value_cache.clone()
    expected = step.attend(spec)
    step = replace(step, key_cache=caches[0], value_cache=caches[1])
    return move(step), expected


def move(step: Step) -> Step:
    """To the GPU; what FlashInfer plans with stays on the host."""
    metadata = replace(
        step.metadata,
        kv_indices=step.metadata.kv_indices.cuda(),
        kv_slots=step.metadata.kv_slots.cuda(),
    )
    tensors = {
        name: getattr(step, name).cuda()
        for name in ("query", "key", "value", "key_cache", "value_cache")
    }
    return replace(step, metadata=metadata, **tensors)


def assert_attends(output: torch.Tensor, expected: torch.Tensor) -> None:
    """
    Args:
        output, expected: [num_tokens, num_heads, head_dim]
    """
    theirs = expected.double()
    error = (output.double().cpu() - theirs).abs().max() / theirs.abs().max()
    assert error < TOLERANCE  # and not NaN, which every unused slot of the cache holds


@contextmanager
def carried_kernels() -> Iterator[None]:
    """Skip the test where FlashInfer lacks a kernel and may not compile it."""
    flashinfer_core: Any = pytest.importorskip("flashinfer.jit.core")
    missing: type[Exception] = getattr(flashinfer_core, "MissingJITCacheError", RuntimeError)
    try:
        yield
    except missing as error:
        if missing is RuntimeError and "JIT" not in str(error):
            raise
        pytest.skip(f"a kernel is not compiled on this machine: {error}")
