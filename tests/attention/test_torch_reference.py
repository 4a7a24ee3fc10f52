"""The reference backend against one softmax a query and head, written out."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.attention import torch_reference
from radixrt.attention.backend import AttentionSpec
from radixrt.attention.metadata import AttentionMetadata
from radixrt.attention.registry import make_backend
from radixrt.attention.setup import AttentionSetup
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.errors import ConfigError

torch.set_num_threads(1)


@dataclass
class Step:
    """A step over a cache in which earlier tokens already lie, and every unused slot is NaN."""

    metadata: AttentionMetadata
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sequences: list[tuple[torch.Tensor, torch.Tensor]]
    """All keys and values of each sequence: [kv_len, num_kv_heads, head_dim]."""

    def attend(self, spec: AttentionSpec) -> torch.Tensor:
        backend = TorchReferenceBackend()
        backend.plan(self.metadata)
        return backend.attend(
            self.query, self.key, self.value, self.key_cache, self.value_cache, spec
        )


def make_step(
    lengths: list[tuple[int, int]], page_size: int, spec: AttentionSpec, dtype: torch.dtype
) -> Step:
    """A step of sequences with (new tokens, KV tokens) each, on pages in random order."""
    generator = torch.Generator().manual_seed(0)

    def randn(tokens: int, heads: int) -> torch.Tensor:
        shape = (tokens, heads, spec.head_dim)
        return torch.randn(shape, generator=generator).to(dtype)

    pages = [-(-kv // page_size) for _, kv in lengths]
    order = random.Random(0).sample(range(sum(pages) + 3), sum(pages))
    shape = (sum(pages) + 3, page_size, spec.num_kv_heads, spec.head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    sequences, new_slots = [], []
    first_page = 0
    for (new, total), count in zip(lengths, pages, strict=True):
        table = order[first_page : first_page + count]
        first_page += count
        slots = [table[p // page_size] * page_size + p % page_size for p in range(total)]
        sequence = (randn(total, spec.num_kv_heads), randn(total, spec.num_kv_heads))
        for cache, states in zip(caches, sequence, strict=True):
            cache.flatten(0, 1)[slots[: total - new]] = states[: total - new]
        new_slots += slots[total - new :]
        sequences.append(sequence)
    metadata = AttentionMetadata(
        qo_indptr_cpu=_indptr([new for new, _ in lengths]),
        kv_indptr_cpu=_indptr(pages),
        last_page_len_cpu=torch.tensor([(kv - 1) % page_size + 1 for _, kv in lengths]).int(),
        kv_indices=torch.tensor(order).int(),
        kv_slots=torch.tensor(new_slots),
        page_size=page_size,
    )
    new_keys, new_values = (
        torch.cat([s[i][-new:] for s, (new, _) in zip(sequences, lengths, strict=True)])
        for i in range(2)
    )
    query = randn(len(new_slots), spec.num_heads)
    return Step(metadata, *caches, query, new_keys, new_values, sequences)


def _indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def written_out(step: Step, spec: AttentionSpec) -> torch.Tensor:
    """Attention by its definition, in float64."""
    output = torch.zeros(step.query.shape, dtype=torch.float64)
    starts = step.metadata.qo_indptr_cpu.tolist()
    for index, (keys, values) in enumerate(step.sequences):
        for token in range(starts[index], starts[index + 1]):
            position = len(keys) - (starts[index + 1] - token)
            first = 0 if spec.sliding_window is None else position - spec.sliding_window + 1
            seen = range(max(0, first), position + 1)
            for head in range(spec.num_heads):
                kv_head = head * spec.num_kv_heads // spec.num_heads
                scores = [
                    float(step.query[token, head].double() @ keys[k, kv_head].double()) * spec.scale
                    for k in seen
                ]
                if spec.soft_cap is not None:
                    scores = [spec.soft_cap * math.tanh(s / spec.soft_cap) for s in scores]
                weights = [math.exp(s - max(scores)) for s in scores]
                for k, weight in zip(seen, weights, strict=True):
                    share = weight / sum(weights)
                    output[token, head] += share * values[k, kv_head].double()
    return output


@st.composite
def _lengths(draw: st.DrawFn) -> tuple[int, int]:
    new = draw(st.one_of(st.just(1), st.integers(1, 9)))
    return new, new + draw(st.one_of(st.just(0), st.integers(0, 20)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(_lengths(), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 4, 100]),
    soft_cap=st.sampled_from([None, 2.0]),
)
def test_any_mix_of_prefill_and_decode_is_the_definition(
    lengths: list[tuple[int, int]],
    page_size: int,
    heads: tuple[int, int],
    window: int | None,
    soft_cap: float | None,
) -> None:
    spec = AttentionSpec(*heads, 8, 0.3, window, soft_cap)
    step = make_step(lengths, page_size, spec, torch.float32)
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
        qo_indptr_cpu=_indptr([8, 1]),
        kv_indptr_cpu=_indptr([2, 3]),
        last_page_len_cpu=torch.tensor([4, 1]).int(),
        kv_indices=torch.tensor([*pages, *pages, spare]).int(),
        kv_slots=torch.cat([m.kv_slots, torch.tensor([spare * 4])]),
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


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="torch_reference"):
        make_backend("flash", AttentionSetup())
