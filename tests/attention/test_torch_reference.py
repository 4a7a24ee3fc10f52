"""The reference backend against one softmax a query and head, written out."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import radixrt_kernels
from radixrt.attention import torch_reference
from radixrt.attention.backend import AttentionSetup, AttentionSpec
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.registry import make_backend
from radixrt.base.errors import ConfigError
from tests.attention.steps import Step, indptr, make_step, step_lengths, written_out

torch.set_num_threads(1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(step_lengths(), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 4, 100]),
    soft_cap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
)
def test_any_mix_of_prefill_and_decode_is_the_definition(
    lengths: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    spec = AttentionSpec(*heads, 8, 0.3, window, soft_cap)
    step = make_step(lengths, page_size, spec, torch.float32)
    step.sinks = torch.linspace(-1.0, 3.0, heads[0]) if has_sinks else None
    torch.testing.assert_close(
        step.attend(spec).double(), written_out(step, spec), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_prefill_of_several_query_blocks_is_the_definition(
    monkeypatch: pytest.MonkeyPatch, window: int | None, soft_cap: float | None
) -> None:
    monkeypatch.setattr(torch_reference, "QUERY_BLOCK", 4)
    spec = AttentionSpec(4, 2, 8, 0.3, window, soft_cap)
    step = make_step([(13, 20), (1, 7), (9, 9)], 3, spec, torch.float32)
    torch.testing.assert_close(
        step.attend(spec).double(), written_out(step, spec), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_definition_up_to_rounding(dtype: torch.dtype) -> None:
    spec = AttentionSpec(4, 2, 16, 0.25)
    step = make_step([(1, 30), (1, 17), (8, 24)], 16, spec, dtype)
    torch.testing.assert_close(
        step.attend(spec).double(), written_out(step, spec), atol=2e-2, rtol=0
    )


def test_a_sequence_reads_pages_that_another_writes_in_the_same_step() -> None:
    spec = AttentionSpec(2, 1, 8, 0.3)
    step = make_step([(8, 8)], 4, spec, torch.float32)
    m = step.metadata
    pages = m.kv_indices.tolist()
    spare = next(p for p in range(len(step.key_cache)) if p not in pages)
    follower = AttentionMetadata(
        qo_indptr_cpu=indptr([8, 1]),
        kv_indptr_cpu=indptr([2, 3]),
        last_page_len_cpu=torch.tensor([4, 1]).int(),
        kv_indices=torch.tensor([*pages, *pages, spare]).int(),
        kv_locations=torch.cat([m.kv_locations, torch.tensor([spare * 4])]),
        page_size=4,
    )
    (keys, values), extra = step.sequences[0], torch.ones(1, 1, 8)
    shared = Step(
        follower,
        step.key_cache,
        step.value_cache,
        torch.cat([step.query, torch.ones(1, 2, 8)]),
        torch.cat([step.key, extra]),
        torch.cat([step.value, extra]),
        [(keys, values), (torch.cat([keys, extra]), torch.cat([values, extra]))],
    )
    torch.testing.assert_close(
        shared.attend(spec).double(), written_out(shared, spec), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("backend", ["torch_reference", "cpu"])
def test_a_layer_reads_what_an_earlier_one_has_written(backend: str) -> None:
    if backend == "cpu" and not radixrt_kernels.available():
        pytest.skip("no native kernels")
    spec, reads = AttentionSpec(4, 2, 8, 0.3), AttentionSpec(6, 2, 8, 0.5, sliding_window=5)
    step = make_step([(1, 30), (9, 20)], 4, spec, torch.float32)
    step.attend(spec, backend)
    query = torch.randn(10, 6, 8, generator=torch.Generator().manual_seed(1))
    kept = step.key_cache.clone()
    reading = replace(step, query=query, key=None, value=None)
    torch.testing.assert_close(
        reading.attend(reads, backend).double(), written_out(reading, reads), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(step.key_cache, kept, equal_nan=True, atol=0, rtol=0)


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="torch_reference"):
        make_backend("flash", AttentionSetup())
