"""Steps of attention: decode, prefill, and decode over prefixes that sequences share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bench.kernels.machine import Case
from radixrt.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    AttentionSetup,
    AttentionSpec,
)
from radixrt.attention.kv_spec import LayerKV
from radixrt.attention.metadata import AttentionMetadata, PrefixGroups
from radixrt.attention.registry import make_backend
from radixrt_kernels.memory import advise_huge_pages

PAGE_SIZE = 16
QWEN_HALF_B = AttentionSpec(14, 2, 64, 64**-0.5)
LLAMA_8B = AttentionSpec(32, 8, 128, 128**-0.5)
MANY_HEADS = AttentionSpec(16, 16, 128, 128**-0.5)
V2_LITE = AttentionSpec(16, 1, 576, 192**-0.5)
V3 = AttentionSpec(128, 1, 576, 192**-0.5)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sequences of equal lengths; ``members`` neighbours share ``shared_pages``."""

    name: str
    spec: AttentionSpec
    sequences: int
    new_tokens: int
    tokens: int
    members: int = 1
    shared_pages: int = 0
    dtype: torch.dtype = torch.bfloat16
    latent_dim: int | None = None
    """Features of a key that are its value; None: values are a tensor of their own."""

    @property
    def value_dim(self) -> int:
        return self.latent_dim or self.spec.head_dim


SHAPES = [
    Shape("decode 16 x 1024, 14/2 x 64", QWEN_HALF_B, 16, 1, 1024),
    Shape("decode 1 x 8192, 14/2 x 64", QWEN_HALF_B, 1, 1, 8192),
    Shape("decode 16 x 1056, 1024 shared by 4", QWEN_HALF_B, 16, 1, 1056, 4, 64),
    Shape("decode 32 x 1056, 1024 shared by 8", QWEN_HALF_B, 32, 1, 1056, 8, 64),
    Shape("decode 8 x 1024, 32/8 x 128", LLAMA_8B, 8, 1, 1024),
    Shape("decode 4 x 1024, 16/16 x 128", MANY_HEADS, 4, 1, 1024),
    Shape("prefill 2048, 14/2 x 64", QWEN_HALF_B, 1, 2048, 2048),
    Shape("prefill 4 x 32 after 1024, 14/2 x 64", QWEN_HALF_B, 4, 32, 1056),
    Shape("prefill 1024, 32/8 x 128", LLAMA_8B, 1, 1024, 1024),
    Shape("decode 1 x 8192, 16 x 576 latents", V2_LITE, 1, 1, 8192, latent_dim=512),
    Shape("decode 8 x 1024, 16 x 576 latents", V2_LITE, 8, 1, 1024, latent_dim=512),
    Shape("decode 4 x 1024, 128 x 576 latents", V3, 4, 1, 1024, latent_dim=512),
    Shape("prefill 1024, 16 x 576 latents", V2_LITE, 1, 1024, 1024, latent_dim=512),
    Shape("float32 decode 8 x 1024, 32/8 x 128", LLAMA_8B, 8, 1, 1024, dtype=torch.float32),
    Shape("float32 decode 16 x 1024, 14/2 x 64", QWEN_HALF_B, 16, 1, 1024, dtype=torch.float32),
    Shape("float32 prefill 1024, 14/2 x 64", QWEN_HALF_B, 1, 1024, 1024, dtype=torch.float32),
]


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        metadata = _metadata(shape)
        layers = [_caches(shape, int(metadata.kv_indices.max()) + 1) for _ in range(4)]
        query, key, value = (
            torch.randn(metadata.num_tokens, heads, shape.spec.head_dim).to(shape.dtype)
            for heads in (shape.spec.num_heads, shape.spec.num_kv_heads, shape.spec.num_kv_heads)
        )
        states = (query, key, value[..., : shape.value_dim])
        yield Case(
            f"attention: {shape.name}",
            _run(make_backend("cpu", AttentionSetup()), metadata, states, layers, shape.spec),
            _run(
                make_backend("torch_reference", AttentionSetup()),
                metadata,
                states,
                layers,
                shape.spec,
            ),
            num_bytes=len(layers) * _bytes_read(shape),
            operations=len(layers) * _operations(shape),
            dtype=shape.dtype,
        )


def _run(
    backend: AttentionBackend,
    metadata: AttentionMetadata,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layers: list[LayerKV],
    spec: AttentionSpec,
) -> Callable[[], None]:
    """A step of several layers with caches of their own, more than the processor's caches hold."""

    def run() -> None:
        backend.plan(metadata)
        for caches in layers:
            backend.attend(AttentionInputs(*states, caches, spec))

    return run


def _metadata(shape: Shape) -> AttentionMetadata:
    pages = -(-shape.tokens // PAGE_SIZE)
    tables = torch.randperm(shape.sequences * pages).int().view(shape.sequences, pages)
    for first in range(0, shape.sequences, shape.members):
        tables[first : first + shape.members, : shape.shared_pages] = tables[
            first, : shape.shared_pages
        ]
    positions = torch.arange(shape.tokens - shape.new_tokens, shape.tokens)
    locations = tables[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    groups = shape.sequences // shape.members
    shared = PrefixGroups(
        np.arange(0, shape.sequences + 1, shape.members, dtype=np.int32),
        np.full(groups, shape.shared_pages, dtype=np.int32),
    )
    count = shape.sequences
    return AttentionMetadata(
        qo_indptr_cpu=(torch.arange(count + 1) * shape.new_tokens).int(),
        kv_indptr_cpu=(torch.arange(count + 1) * pages).int(),
        last_page_len_cpu=torch.full((count,), (shape.tokens - 1) % PAGE_SIZE + 1).int(),
        kv_indices=tables.flatten(),
        kv_locations=locations.flatten(),
        page_size=PAGE_SIZE,
        shared_prefixes=shared if shape.shared_pages else None,
    )


def _caches(shape: Shape, pages: int) -> LayerKV:
    size = (pages, PAGE_SIZE, shape.spec.num_kv_heads, shape.spec.head_dim)
    keys, values = torch.empty(size, dtype=shape.dtype), torch.empty(size, dtype=shape.dtype)
    for cache in (keys, values):
        advise_huge_pages(cache)
        cache.normal_()
    return (keys,) if shape.latent_dim else (keys, values)


def _bytes_read(shape: Shape) -> int:
    """Keys and values, what is shared only once."""
    again = (
        (shape.members - 1) * (shape.sequences // shape.members) * shape.shared_pages * PAGE_SIZE
    )
    keys = shape.sequences * shape.tokens - again
    features = shape.spec.head_dim + (0 if shape.latent_dim else shape.value_dim)
    return keys * shape.spec.num_kv_heads * features * shape.dtype.itemsize


def _operations(shape: Shape) -> float:
    """Two products of a multiplication and an addition, for each query and key that it sees."""
    before = shape.tokens - shape.new_tokens
    seen = shape.new_tokens * (before + (shape.new_tokens + 1) / 2)
    features = shape.spec.head_dim + shape.value_dim
    return 2 * shape.spec.num_heads * features * shape.sequences * seen
