"""Measures FlashInfer's attention: FA2 and FA3, decode by tensor cores, planning on the host."""

import time
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu.ceilings import Ceilings, median_seconds
from bench.gpu.results import Result, Results

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
"""Sizes of Llama-3.1-8B."""

PREFILLS = {
    "256 new after 16k cached": [(256, 16384 + 256)],
    "8,192 new": [(8192, 8192)],
    "8 prompts of 1,024": [(1024, 1024)] * 8,
    "32 times 64 new after 2k cached": [(64, 2048 + 64)] * 32,
}
"""(new tokens, all tokens) of each sequence of a step."""

DECODES = {f"decode, {batch} of 2k": [(1, 2048)] * batch for batch in (1, 64, 256)}


def measure_attention(device: torch.device, ceilings: Ceilings, results: Results) -> None:
    """Time a layer's attention by each kernel that computes it."""
    import flashinfer

    prefill, decode = (
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
    )
    for name, lengths in PREFILLS.items():
        step = _Step(lengths, device)
        wrappers: dict[str, Any] = {
            kernel: prefill(step.workspace, backend=kernel.lower()) for kernel in ("FA2", "FA3")
        }
        for wrapper in wrappers.values():
            step.plan_prefill(wrapper)
        _add(name, wrappers, step, ceilings, results)
    for name, lengths in DECODES.items():
        step = _Step(lengths, device)
        wrappers = {
            "tensor cores": decode(step.workspace, use_tensor_cores=True),
            "no tensor cores": decode(step.workspace.clone(), use_tensor_cores=False),
        }
        figures = {}
        for kernel, wrapper in wrappers.items():
            times = []
            for _ in range(10):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                step.plan_decode(wrapper)
                times.append(time.perf_counter() - begin)
            figures[f"plan, {kernel}, host µs"] = median(times) * 1e6
        _add(name, wrappers, step, ceilings, results, figures)


def _add(
    name: str,
    wrappers: dict[str, Any],
    step: "_Step",
    ceilings: Ceilings,
    results: Results,
    figures: dict[str, float] | None = None,
) -> None:
    figures = dict(figures or {})
    bound_s = max(
        step.num_bytes / ceilings.read_bytes_per_s, step.flops / ceilings.gemm_flops_per_s
    )
    bound = {}
    for kernel, wrapper in wrappers.items():
        seconds = median_seconds(partial(wrapper.run, step.query, step.cache), step.device)
        figures[f"{kernel} µs"] = seconds * 1e6
        bound[f"{kernel} µs"] = bound_s * 1e6
    results.add(Result(7, f"attention, {name}", figures, bound))


class _Step:
    """Sequences with their pages in order, in bfloat16."""

    def __init__(self, lengths: list[tuple[int, int]], device: torch.device) -> None:
        self.device = device
        pages = [-(-total // PAGE_SIZE) for _, total in lengths]
        new = [length for length, _ in lengths]
        self.workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        self.query = torch.randn(sum(new), HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
        shape = (sum(pages), PAGE_SIZE, KV_HEADS, HEAD_DIM)
        self.cache = tuple(
            torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self._qo_indptr = _indptr(new)
        self._table = (
            _indptr(pages),
            torch.arange(sum(pages), dtype=torch.int32, device=device),
            torch.tensor([(total - 1) % PAGE_SIZE + 1 for _, total in lengths]).int().pin_memory(),
        )
        pairs = sum(length * (total - length / 2) for length, total in lengths)
        self.flops = 4 * HEADS * HEAD_DIM * pairs
        self.num_bytes = 2 * (2 * sum(total for _, total in lengths) * KV_HEADS * HEAD_DIM)

    def plan_prefill(self, wrapper: Any) -> None:
        wrapper.plan(
            self._qo_indptr, *self._table, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE,
            causal=True, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip

    def plan_decode(self, wrapper: Any) -> None:
        wrapper.plan(
            *self._table, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE,
            q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
        )  # fmt: skip


def _indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().pin_memory()
