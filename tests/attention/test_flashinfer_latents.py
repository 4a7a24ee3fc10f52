"""FlashInfer's kernel for latents is planned for what a step is; its part is computed by the
definition of attention."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.attention.backend import AttentionInputs, AttentionSetup, AttentionSpec
from radixrt.attention.flashinfer import FlashInferBackend
from radixrt.attention.flashinfer_latents import why_not_latents
from radixrt.attention.kv_spec import KVSpec
from radixrt.attention.torch_reference import TorchReferenceBackend
from tests.attention.fake_flashinfer import BatchMLA, FakeFlashInfer
from tests.attention.steps import Step, make_step, written_out
from tests.fake_device import FakeDevice

LATENT, ROPE = 8, 4
SPEC = AttentionSpec(num_heads=4, num_kv_heads=1, head_dim=LATENT + ROPE, scale=0.3)


def setup_for(step: Step, *specs: AttentionSpec, **changes: Any) -> AttentionSetup:
    dtype = step.query.dtype
    kept = [KVSpec.latents(LATENT, ROPE, dtype)] * len(specs)
    setup = AttentionSetup(specs, dtype, dtype, step.metadata.page_size, max_rows=16, max_pages=64)
    return replace(setup, kv_specs=kept, **changes)


def latent_step(lengths: list[tuple[int, int]], page_size: int, spec: AttentionSpec = SPEC) -> Step:
    """Values are the first features of the keys."""
    step = make_step(lengths, page_size, spec, torch.float32)
    step.sequences = [(keys, keys) for keys, _ in step.sequences]
    return step


def attend(backend: Any, step: Step, spec: AttentionSpec = SPEC) -> tuple[torch.Tensor, Any]:
    assert step.key is not None
    backend.plan(step.metadata)
    cache = step.key_cache.clone()
    values = step.key[..., :LATENT]
    return backend.attend(AttentionInputs(step.query, step.key, values, (cache,), spec)), cache


def assert_attends(backend: Any, step: Step, spec: AttentionSpec = SPEC) -> None:
    expected = written_out(step, spec)[..., :LATENT]
    found, _ = attend(backend, step, spec)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


_lengths = st.integers(1, 9).flatmap(
    lambda new: st.tuples(st.sampled_from([1, new]), st.integers(0, 20))
)


@settings(max_examples=25)
@given(
    lengths=st.lists(_lengths, min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([1, 4, 5]),
    hopper=st.booleans(),
)
def test_any_mix_of_prefill_and_decode_is_the_definition(
    lengths: list[tuple[int, int]], page_size: int, heads: int, hopper: bool
) -> None:
    """Of five heads, too, which are filled up to eight."""
    spec = replace(SPEC, num_heads=heads)
    step = latent_step([(new, new + old) for new, old in lengths], page_size, spec)
    library = FakeFlashInfer(hopper=hopper)
    assert_attends(FlashInferBackend(setup_for(step, spec), library), step, spec)
    assert {w.backend for w in library.wrappers} == {"fa3" if hopper else "fa2"}
    assert all(isinstance(wrapper, BatchMLA) for wrapper in library.wrappers)


def test_each_kind_of_rows_is_planned_once_a_step() -> None:
    step = latent_step([(1, 9), (1, 20), (7, 11), (1, 4)], 4)
    library = FakeFlashInfer()
    backend = FlashInferBackend(setup_for(step, *[SPEC] * 3), library)
    backend.plan(step.metadata)
    rows = [len(w.planned.last_page_len) for w in library.wrappers if w.planned]
    assert rows == [2, 2] and [w.num_plans for w in library.wrappers] == [1, 1]


def test_the_cache_holds_what_the_reference_writes() -> None:
    step = latent_step([(1, 9), (5, 11)], 4)
    backends = FlashInferBackend(setup_for(step, SPEC), FakeFlashInfer()), TorchReferenceBackend()
    caches = [attend(backend, step)[1] for backend in backends]
    torch.testing.assert_close(*caches, equal_nan=True, rtol=0, atol=0)


def test_a_layer_without_keys_reads_what_was_written() -> None:
    step = latent_step([(1, 9), (5, 11)], 4)
    backend = FlashInferBackend(setup_for(step, SPEC), FakeFlashInfer())
    first, cache = attend(backend, step)
    again = AttentionInputs(step.query, None, step.key[..., :LATENT], (cache,), SPEC)  # type: ignore[index]
    assert torch.equal(backend.attend(again), first)


def test_a_graph_reads_what_was_planned_last() -> None:
    first, second = latent_step([(1, 9), (1, 20)], 4), latent_step([(1, 30), (1, 5)], 4)
    parent = FlashInferBackend(setup_for(first, SPEC), FakeFlashInfer())
    assert parent.graph_kinds(2) == ("plain",) and parent.graph_kind(first.metadata) == "plain"
    parent.reserve_for_graphs()
    graph = parent.for_graph(2, "plain")
    for step in (first, second, first):
        assert_attends(graph, step)


def test_a_plan_waits_until_the_device_has_read_the_last() -> None:
    device = FakeDevice()
    step = latent_step([(1, 9), (1, 20)], 4)
    backend = FlashInferBackend(setup_for(step, SPEC, device=device), FakeFlashInfer())
    backend.plan(step.metadata)
    device.compute()
    backend.plan(step.metadata)
    backend.plan(step.metadata)
    assert [what for what, _ in device.waits] == ["mark"]


@pytest.mark.parametrize("place", ["__init__", "plan"])
def test_where_fa3_fails_fa2_computes(place: str, caplog: pytest.LogCaptureFixture) -> None:
    step = latent_step([(1, 9), (5, 11)], 4)
    library = FakeFlashInfer(fa3_fails_in=place)
    assert_attends(FlashInferBackend(setup_for(step, SPEC), library), step)
    assert {w.backend for w in library.wrappers if w.num_launches} == {"fa2"}
    assert "FA3" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "changes", "match"),
    [
        ((512, 64), {}, None),
        ((128, 64), {}, None),
        ((32, 8), {}, "128 features and 64 rotated"),
        ((512, 32), {}, "128 features and 64 rotated"),
        ((512, 64), {"kv_dtype": torch.float8_e4m3fn}, "--kv-cache-dtype auto"),
        ((512, 64), {"deterministic": True}, "--deterministic"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(
    sizes: tuple[int, int], changes: dict[str, Any], match: str | None
) -> None:
    dtype = torch.bfloat16
    setup = AttentionSetup(
        dtype=dtype, kv_dtype=dtype, kv_specs=[KVSpec.latents(*sizes, dtype)] * 2
    )
    reason = why_not_latents(replace(setup, **changes))
    assert reason is None if match is None else reason is not None and match in reason


def test_every_call_fits_the_real_signatures() -> None:
    """The package is imported without a GPU; its kernels are not run."""
    real = pytest.importorskip("flashinfer")
    library = FakeFlashInfer()
    step = latent_step([(1, 21), (1, 19), (5, 11)], 4)
    parent = FlashInferBackend(setup_for(step, SPEC), library)
    assert_attends(parent, step)
    assert_attends(parent.for_graph(2, "plain"), latent_step([(1, 21), (1, 19)], 4))
    for call in library.calls:
        target: Any = real.mla
        for part in call.name.split("."):
            target = getattr(target, part)
        inspect.signature(target).bind(*call.arguments, **call.options)
    tables = [call.options["metadata"] for call in library.calls if call.name.endswith(".plan")]
    inspect.signature(real.mla.MLAPlanMetadata.csr).bind(*vars(tables[0]).values())
