"""FlashInfer by itself: does it compute what its signatures promise, on the calls that radixrt makes?"""

from typing import Any

import pytest
import torch

from tests.attention.steps import Step
from tests.gpu.on_device import LLAMA, assert_attends, make_steps

flashinfer: Any = pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

BF16 = torch.bfloat16
DECODES = [(1, 1), (1, 16), (1, 17), (1, 300), (1, 64)]
MIXED = [(5, 5), (1, 40), (33, 120), (16, 16), (70, 71)]
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 16])


def workspace() -> torch.Tensor:
    return torch.empty(128 << 20, dtype=torch.uint8, device="cuda")


def table(step: Step) -> list[torch.Tensor]:
    metadata = step.metadata
    host = metadata.kv_indptr_cpu, metadata.last_page_len_cpu
    return [host[0].pin_memory(), metadata.kv_indices, host[1].pin_memory()]


def append(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the step's keys and values; returns the caches."""
    caches = step.key_cache, step.value_cache
    for cache, states in zip(caches, (step.key, step.value), strict=True):
        cache.view(-1, *cache.shape[2:])[step.metadata.kv_slots.long()] = states
    return caches


def plan_prefill(wrapper: Any, step: Step) -> None:
    wrapper.plan(
        step.metadata.qo_indptr_cpu.pin_memory(),
        *table(step),
        LLAMA.num_heads,
        LLAMA.num_kv_heads,
        LLAMA.head_dim,
        step.metadata.page_size,
        causal=True,
        sm_scale=LLAMA.scale,
        q_data_type=BF16,
        kv_data_type=BF16,
    )


def plan_decode(wrapper: Any, step: Step) -> None:
    wrapper.plan(
        *table(step),
        LLAMA.num_heads,
        LLAMA.num_kv_heads,
        LLAMA.head_dim,
        step.metadata.page_size,
        sm_scale=LLAMA.scale,
        q_data_type=BF16,
        kv_data_type=BF16,
    )


@PAGE_SIZES
def test_append(page_size: int) -> None:
    step, _ = make_steps(MIXED, page_size)
    metadata = step.metadata
    lengths = metadata.kv_lengths().cuda()
    batch_indices, positions = flashinfer.get_batch_indices_positions(
        metadata.qo_indptr_cpu.cuda(), lengths, metadata.num_tokens
    )
    theirs = step.key_cache.clone(), step.value_cache.clone()
    flashinfer.append_paged_kv_cache(
        step.key,
        step.value,
        batch_indices,
        positions,
        theirs,
        metadata.kv_indices,
        metadata.kv_indptr_cpu.cuda(),
        metadata.last_page_len_cpu.cuda(),
    )
    for ours, expected in zip(append(step), theirs, strict=True):
        assert torch.equal(ours.nan_to_num(9.0), expected.nan_to_num(9.0))


@PAGE_SIZES
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_prefill(backend: str, page_size: int) -> None:
    step, expected = make_steps(MIXED, page_size)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
    plan_prefill(wrapper, step)
    assert_attends(wrapper.run(step.query, append(step)), expected)


@PAGE_SIZES
@pytest.mark.parametrize("tensor_cores", [False, True])
def test_decode(tensor_cores: bool, page_size: int) -> None:
    step, expected = make_steps(DECODES, page_size)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_tensor_cores=tensor_cores
    )
    plan_decode(wrapper, step)
    assert_attends(wrapper.run(step.query, append(step)), expected)


@PAGE_SIZES
def test_merging_two_halves_of_the_keys_is_attending_to_all(page_size: int) -> None:
    """What a cascade does with a shared prefix: here each sequence's first 64 tokens."""
    step, expected = make_steps([(1, 64 + own) for own in (1, 16, 33)], page_size)
    caches, pages = append(step), 64 // page_size
    indptr = step.metadata.kv_indptr_cpu
    first = torch.cat(
        [step.metadata.kv_indices[start : start + pages] for start in indptr[:-1].tolist()]
    )
    rest = torch.cat(
        [step.metadata.kv_indices[a + pages : b] for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)]
    )  # fmt: skip
    halves = (
        (torch.arange(4, dtype=torch.int32) * pages, first, torch.full((3,), page_size).int(), False),
        (indptr - torch.arange(4, dtype=torch.int32) * pages, rest, step.metadata.last_page_len_cpu, True),
    )  # fmt: skip
    states = []
    for page_indptr, page_ids, last, causal in halves:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2")
        wrapper.plan(
            step.metadata.qo_indptr_cpu, page_indptr, page_ids, last,
            LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim, page_size,
            causal=causal, sm_scale=LLAMA.scale, q_data_type=BF16, kv_data_type=BF16,
        )  # fmt: skip
        states += wrapper.run(step.query, caches, return_lse=True)
    output, _ = flashinfer.merge_state(*states)
    flashinfer.merge_state_in_place(*states)
    assert_attends(output, expected)
    assert_attends(states[0], expected)


def test_a_captured_decode_reads_the_table_that_is_planned_before_its_replay() -> None:
    page_size, batch = 16, len(DECODES)
    first, _ = make_steps(DECODES, page_size)
    second, expected = make_steps([(1, 90), (1, 2), (1, 33), (1, 250), (1, 128)], page_size)
    buffers = [
        torch.zeros(size, dtype=torch.int32, device="cuda") for size in (batch + 1, 256, batch)
    ]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        workspace(), *buffers, use_tensor_cores=True
    )
    cache_shape = (64, *second.key_cache.shape[1:])
    caches = tuple(torch.zeros(cache_shape, dtype=BF16, device="cuda") for _ in range(2))
    query = first.query.clone()
    plan_decode(wrapper, first)
    wrapper.run(query, caches)  # compiles and allocates
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = wrapper.run(query, caches)
    for ours, theirs in zip(caches, append(second), strict=True):
        ours[: len(theirs)] = theirs
    query.copy_(second.query)
    plan_decode(wrapper, second)
    graph.replay()
    assert_attends(output, expected)


def test_plans_that_do_not_wait_for_one_another_need_buffers_of_their_own() -> None:
    """The staging race: two wrappers planned while the device is busy, each right in the end."""
    steps = [make_steps(DECODES, 16), make_steps([(1, 200 + i) for i in range(5)], 16)]
    busy = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    wrappers = [
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
        for _ in steps
    ]
    caches = [append(step) for step, _ in steps]
    for _ in range(10):
        for _ in range(20):
            busy = (busy @ busy).clamp_(-1, 1)
        outputs = []
        for wrapper, (step, _), cache in zip(wrappers, steps, caches, strict=True):
            plan_decode(wrapper, step)
            outputs.append(wrapper.run(step.query, cache))
        for output, (_, expected) in zip(outputs, steps, strict=True):
            assert_attends(output, expected)
