"""The FlashInfer backend on a GPU: all its kernels, fp8, cascades, graphs, plans in a row.

Each against the reference in float32 from the same rounded numbers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from radixrt.attention import flashinfer
from radixrt.attention.backend import AttentionInputs, AttentionSetup, AttentionSpec
from radixrt.attention.flashinfer import FlashInferBackend, make_flashinfer
from radixrt.attention.kv_spec import KVSpec, to_kv_dtype
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.device.device import CudaDevice
from tests.attention.steps import Step, make_step, share

pytest.importorskip("flashinfer", reason="FlashInfer is not installed")

LLAMA_8B = AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5)
NO_GROUPS = AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=128, scale=128**-0.5)
SMALL_HEADS = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=64, scale=0.125)
LARGEST_ERROR = 1e-2
"""Of the result's norm, in bfloat16."""


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda", 0))


def backend_for(
    device: CudaDevice, step: Step, *specs: AttentionSpec, **changes: Any
) -> FlashInferBackend:
    dtype = torch.bfloat16
    setup = AttentionSetup(specs, dtype, dtype, step.metadata.page_size, 64, 4096, device)
    return make_flashinfer(replace(setup, **changes))


def to_gpu(step: Step, device: CudaDevice, kv_dtype: torch.dtype = torch.bfloat16) -> Step:
    """The step in the device's memory, and what it plans with in pinned memory."""
    metadata, place = step.metadata, device.torch_device
    pinned = device.pin(
        metadata.qo_indptr_cpu.numpy(), metadata.kv_indptr_cpu.numpy(), metadata.last_page_len_cpu.numpy()
    )  # fmt: skip
    moved = AttentionMetadata(
        *pinned,
        kv_indices=metadata.kv_indices.to(place),
        kv_locations=metadata.kv_locations.to(place),
        page_size=metadata.page_size,
        shared_prefixes=metadata.shared_prefixes,
    )
    query, key, value = (t.to(place) for t in (step.query, step.key, step.value))
    caches = [
        to_kv_dtype(cache.nan_to_num(0), kv_dtype).to(place)
        for cache in (step.key_cache, step.value_cache)
    ]
    return Step(moved, *caches, query, key, value, step.sequences)


def attend(backend: Any, step: Step, spec: AttentionSpec) -> torch.Tensor:
    caches = step.key_cache.clone(), step.value_cache.clone()
    backend.plan(step.metadata)
    return backend.attend(AttentionInputs(step.query, step.key, step.value, caches, spec))


def expected(step: Step, spec: AttentionSpec) -> torch.Tensor:
    """By the reference, in float32 from the same rounded numbers. ``step`` is on the host."""
    backend = TorchReferenceBackend()
    backend.plan(step.metadata)
    numbers = [t.float() for t in (step.query, step.key, step.value)]
    caches = [cache.nan_to_num(0).float() for cache in (step.key_cache, step.value_cache)]
    return backend.attend(AttentionInputs(*numbers, caches, spec))


def assert_close(
    result: torch.Tensor, wanted: torch.Tensor, largest: float = LARGEST_ERROR
) -> None:
    error = (result.float().cpu() - wanted).norm() / wanted.norm()
    assert error < largest, f"relative error {error:.4f}"


MIXED = [(1, 900), (1, 17), (1, 1), (1, 4000), (300, 300), (256, 2000), (7, 1024), (1, 33)]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "spec",
    [
        LLAMA_8B,
        NO_GROUPS,
        SMALL_HEADS,
        replace(LLAMA_8B, sliding_window=512),
        replace(LLAMA_8B, soft_cap=30.0),
    ],
    ids=["llama-8b", "no-groups", "small-heads", "window", "soft-cap"],
)
@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_decodes_prefills_and_extensions(
    device: CudaDevice,
    page_size: int,
    spec: AttentionSpec,
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer, "prefill_kernel", lambda *arguments: kernel)
    step = make_step(MIXED, page_size, spec, torch.bfloat16)
    result = attend(backend_for(device, step, spec), to_gpu(step, device), spec)
    assert_close(result, expected(step, spec))


def test_what_is_appended_lies_where_the_reference_puts_it(device: CudaDevice) -> None:
    step = make_step(MIXED, 16, LLAMA_8B, torch.bfloat16)
    on_gpu = to_gpu(step, device)
    backend = backend_for(device, step, LLAMA_8B)
    caches_on_gpu = on_gpu.key_cache, on_gpu.value_cache
    backend.plan(on_gpu.metadata)
    backend.attend(AttentionInputs(on_gpu.query, on_gpu.key, on_gpu.value, caches_on_gpu, LLAMA_8B))
    reference = TorchReferenceBackend()
    reference.plan(step.metadata)
    caches = step.key_cache.nan_to_num(0), step.value_cache.nan_to_num(0)
    reference.attend(AttentionInputs(step.query, step.key, step.value, caches, LLAMA_8B))
    for mine, theirs in zip(caches_on_gpu, caches, strict=True):
        assert torch.equal(mine.cpu(), theirs)


def test_an_fp8_cache(device: CudaDevice) -> None:
    step = make_step(MIXED, 16, LLAMA_8B, torch.bfloat16)
    fp8 = torch.float8_e4m3fn
    backend = backend_for(device, step, LLAMA_8B, kv_dtype=fp8)
    result = attend(backend, to_gpu(step, device, fp8), LLAMA_8B)

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return to_kv_dtype(t.nan_to_num(0), fp8).to(torch.bfloat16)

    coarse = replace(
        step,
        key_cache=rounded(step.key_cache),
        value_cache=rounded(step.value_cache),
        key=rounded(step.key),
        value=rounded(step.value),
    )
    assert_close(result, expected(coarse, LLAMA_8B), 2 * LARGEST_ERROR)


# ---------------------------------------------------------------- cascades and graphs


def shared_step(page_size: int, tails: list[int]) -> Step:
    """Three sequences share 640 tokens, two share 64, and one is alone."""
    shared = [640, 640, 640, 64, 64, 0]
    lengths = [(1, prefix + tail) for prefix, tail in zip(shared, tails, strict=True)]
    step = make_step(lengths, page_size, LLAMA_8B, torch.bfloat16)
    return share(step, [(3, 640 // page_size), (2, 64 // page_size), (1, 0)])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_a_cascade(
    device: CudaDevice, page_size: int, soft_cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "cascade_pays", lambda *arguments: True)
    spec = replace(LLAMA_8B, soft_cap=soft_cap)
    step = shared_step(page_size, [1, 40, 300, 7, 90, 1000])
    result = attend(backend_for(device, step, spec), to_gpu(step, device), spec)
    assert_close(result, expected(step, spec))


@pytest.mark.parametrize("kind", ["plain", "cascade"])
def test_a_captured_graph_with_changing_page_tables(
    device: CudaDevice, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer, "cascade_pays", lambda *arguments: True)
    steps = [
        shared_step(16, tails) for tails in ([1, 40, 300, 7, 90, 1000], [500, 2, 3, 400, 1, 20])
    ]
    parent = backend_for(device, steps[0], LLAMA_8B)
    backend = parent.for_graph(6, kind)
    places = [to_gpu(step, device) for step in steps]
    pages = max(len(step.key_cache) for step in places)
    inputs = [torch.zeros_like(t) for t in (places[0].query, places[0].key, places[0].value)]
    caches = [torch.zeros(pages, *c.shape[1:], dtype=c.dtype, device=c.device)
              for c in (places[0].key_cache, places[0].value_cache)]  # fmt: skip
    backend.plan(places[0].metadata)
    replay, out = device.capture(
        lambda: backend.attend(AttentionInputs(*inputs, tuple(caches), LLAMA_8B))
    )
    for step, place in [*zip(steps, places, strict=True)] * 2:
        for buffer, values in zip(inputs, (place.query, place.key, place.value), strict=True):
            buffer.copy_(values)
        for cache, values in zip(caches, (place.key_cache, place.value_cache), strict=True):
            cache[: len(values)].copy_(values)
        backend.plan(place.metadata)
        replay()
        assert_close(out, expected(step, LLAMA_8B))


def test_plans_in_a_row_do_not_overwrite_one_another(device: CudaDevice) -> None:
    """The host is far ahead: each plan's copy waits behind slow kernels while the next is made."""
    steps = [
        make_step([(1, length)] * 8, 16, LLAMA_8B, torch.bfloat16) for length in (3000, 5, 700, 64)
    ]
    backend = backend_for(device, steps[0], LLAMA_8B)
    places = [to_gpu(step, device) for step in steps]
    matrix = torch.randn(8192, 8192, device=device.torch_device, dtype=torch.bfloat16)
    results = []
    for place in places * 4:
        for _ in range(5):
            matrix @ matrix
        results.append(attend(backend, place, LLAMA_8B))
    for result, step in zip(results, steps * 4, strict=True):
        assert_close(result, expected(step, LLAMA_8B))


def test_no_operation_of_a_step_waits_for_the_device(device: CudaDevice) -> None:
    step = shared_step(16, [1, 40, 300, 7, 90, 1000])
    place = to_gpu(step, device)
    backend = backend_for(device, step, LLAMA_8B)
    attend(backend, place, LLAMA_8B)  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(backend, place, LLAMA_8B)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------- latents


def latent_step(lengths: list[tuple[int, int]], spec: AttentionSpec) -> Step:
    """Values are the first features of the keys."""
    step = make_step(lengths, 16, spec, torch.bfloat16)
    assert step.key is not None
    return replace(step, value=step.key[..., :512], value_cache=step.key_cache)


def latent_backend(device: CudaDevice, step: Step, *specs: AttentionSpec, **changes: Any) -> Any:
    kept = [KVSpec.latents(512, 64, torch.bfloat16)] * len(specs)
    return backend_for(device, step, *specs, kv_specs=kept, **changes)


def attend_latents(backend: Any, step: Step, spec: AttentionSpec) -> torch.Tensor:
    backend.plan(step.metadata)
    cache = (step.key_cache.clone(),)
    return backend.attend(AttentionInputs(step.query, step.key, step.value, cache, spec))


@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_latents(device: CudaDevice, heads: int, kernel: str) -> None:
    """Of DeepSeek V2 Lite, GLM-4.7-Flash and DeepSeek V3."""
    spec = AttentionSpec(heads, 1, 576, 192**-0.5)
    step = latent_step(MIXED, spec)
    backend = latent_backend(device, step, spec, prefill_kernel=kernel)
    wanted = expected_of_latents(step, spec)
    assert_close(attend_latents(backend, to_gpu(step, device), spec), wanted)


def expected_of_latents(step: Step, spec: AttentionSpec) -> torch.Tensor:
    backend = TorchReferenceBackend()
    backend.plan(step.metadata)
    assert step.key is not None and step.value is not None
    cache = (step.key_cache.nan_to_num(0).float(),)
    return backend.attend(
        AttentionInputs(step.query.float(), step.key.float(), step.value.float(), cache, spec)
    )


def test_a_captured_graph_of_latents(device: CudaDevice) -> None:
    spec = AttentionSpec(20, 1, 576, 192**-0.5)
    steps = [latent_step([(1, n) for n in lengths], spec) for lengths in ([9, 700], [1000, 30])]
    graph = latent_backend(device, steps[0], spec).for_graph(2, "plain")
    places = [to_gpu(step, device) for step in steps]
    query, key = (torch.zeros_like(t) for t in (places[0].query, places[0].key))  # type: ignore[arg-type]
    pages = max(len(place.key_cache) for place in places)
    cache = torch.zeros(pages, *places[0].key_cache.shape[1:], dtype=torch.bfloat16, device=query.device)  # fmt: skip
    graph.plan(places[0].metadata)
    inputs = AttentionInputs(query, key, key[..., :512], (cache,), spec)
    replay, out = device.capture(lambda: graph.attend(inputs))
    for step, place in [*zip(steps, places, strict=True)] * 2:
        assert place.key is not None
        query.copy_(place.query)
        key.copy_(place.key)
        cache[: len(place.key_cache)].copy_(place.key_cache)
        graph.plan(place.metadata)
        replay()
        assert_close(out, expected_of_latents(step, spec))
