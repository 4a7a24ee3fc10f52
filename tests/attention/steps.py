"""Steps over a paged cache for tests of attention backends, and what attention is by its
definition."""

import math
import random
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import strategies as st

from radixrt.attention.backend import AttentionInputs, AttentionSetup, AttentionSpec
from radixrt.attention.metadata import AttentionMetadata, PrefixGroups
from radixrt.attention.registry import make_backend


@dataclass
class Step:
    """A step over a cache in which earlier tokens already lie, and every unused location is NaN."""

    metadata: AttentionMetadata
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    """None, as the keys: they are in the caches."""
    sequences: list[tuple[torch.Tensor, torch.Tensor]]
    """All keys and values of each sequence: [kv_len, num_kv_heads, head_dim]."""
    sinks: torch.Tensor | None = None

    def attend(self, spec: AttentionSpec, backend_name: str = "torch_reference") -> torch.Tensor:
        backend = make_backend(backend_name, AttentionSetup())
        backend.plan(self.metadata)
        return backend.attend(
            AttentionInputs(
                self.query,
                self.key,
                self.value,
                (self.key_cache, self.value_cache),
                spec,
                self.sinks,
            )
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
    sequences, new_locations = [], []
    first_page = 0
    for (new, total), count in zip(lengths, pages, strict=True):
        table = order[first_page : first_page + count]
        first_page += count
        locations = [table[p // page_size] * page_size + p % page_size for p in range(total)]
        sequence = (randn(total, spec.num_kv_heads), randn(total, spec.num_kv_heads))
        for cache, states in zip(caches, sequence, strict=True):
            cache.flatten(0, 1)[locations[: total - new]] = states[: total - new]
        new_locations += locations[total - new :]
        sequences.append(sequence)
    metadata = AttentionMetadata(
        qo_indptr_cpu=indptr([new for new, _ in lengths]),
        kv_indptr_cpu=indptr(pages),
        last_page_len_cpu=torch.tensor([(kv - 1) % page_size + 1 for _, kv in lengths]).int(),
        kv_indices=torch.tensor(order).int(),
        kv_locations=torch.tensor(new_locations),
        page_size=page_size,
    )
    new_keys, new_values = (
        torch.cat([s[i][-new:] for s, (new, _) in zip(sequences, lengths, strict=True)])
        for i in range(2)
    )
    query = randn(len(new_locations), spec.num_heads)
    return Step(metadata, *caches, query, new_keys, new_values, sequences)


def indptr(lengths: list[int]) -> torch.Tensor:
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
                sinks = [] if step.sinks is None else [float(step.sinks[head])]
                weights = [math.exp(s - max(scores + sinks)) for s in scores + sinks]
                for k, weight in zip(seen, weights, strict=False):
                    share = weight / sum(weights)
                    output[token, head] += share * values[k, kv_head].double()
    return output


@st.composite
def step_lengths(draw: st.DrawFn) -> tuple[int, int]:
    new = draw(st.one_of(st.just(1), st.integers(1, 9)))
    return new, new + draw(st.one_of(st.just(0), st.integers(0, 20)))


def share(step: Step, groups: list[tuple[int, int]]) -> Step:
    """Let the first rows begin with the pages of the first row of their group: (rows, pages)
    each."""
    indptr, indices = step.metadata.kv_indptr_cpu, step.metadata.kv_indices.clone()
    sequences, first, size = list(step.sequences), 0, step.metadata.page_size
    for rows, pages in groups:
        for row in range(first, first + rows):
            start, leader = int(indptr[row]), int(indptr[first])
            indices[start : start + pages] = step.metadata.kv_indices[leader : leader + pages]
            sequences[row] = tuple(
                torch.cat((of_leader[: pages * size], own[pages * size :]))
                for of_leader, own in zip(step.sequences[first], step.sequences[row], strict=True)
            )
        first += rows
    prefixes = PrefixGroups(
        np.cumsum([0, *(rows for rows, _ in groups)], dtype=np.int32),
        np.array([pages for _, pages in groups], dtype=np.int32),
    )
    metadata = replace(step.metadata, kv_indices=indices, shared_prefixes=prefixes)
    return replace(step, metadata=metadata, sequences=sequences)
