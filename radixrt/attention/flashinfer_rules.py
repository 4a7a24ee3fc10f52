"""Rules that choose among FlashInfer's kernels; measurements decide them.

No number below has been measured on a GPU yet: they follow from the design of the kernels, and
``make gpu-check`` measures them.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from radixrt.attention.backend import AttentionSpec

HEAD_DIMS = (64, 128, 256)
"""For which FlashInfer has kernels."""

TENSOR_CORES_FROM_GROUP = 4
"""Query heads a KV head from which decoding pays for tensor cores: their tile has 16 rows, which
fewer heads leave empty. FlashInfer's plain decode kernel has no group sizes beyond 8, and not all
below."""

FA3_TILE_QUERIES = 128
FA3_FROM_TILES = 264
"""Tiles of queries times heads from which FA3 computes a prefill: two for each of an H100's or
H200's 132 multiprocessors. FA3 doesn't split the keys of a tile among multiprocessors, so a short
extension of a long cached prefix leaves most of them idle; FA2 does."""

MEMORY_BYTES_PER_S = 4.0e12
ATTENTION_FLOPS_PER_S = 4.0e14
CASCADE_OVERHEAD_S = 20e-6
"""Fixed cost of a cascade a layer: two more kernels, and the partial results that they write."""

CASCADE_GRAPH_FROM_ROWS = 4
"""Smaller decode steps have no graph with a cascade."""

PrefillKernel = Literal["fa2", "fa3"]


def decode_with_tensor_cores(spec: AttentionSpec) -> bool:
    """Decode by the prefill kernel, whose rows are the query heads of one KV head."""
    return spec.num_heads // spec.num_kv_heads >= TENSOR_CORES_FROM_GROUP


def prefill_kernel(query_lengths: NDArray[np.integer], num_heads: int) -> PrefillKernel:
    """The kernel for prefills of these lengths [rows], where both run."""
    tiles = -(-query_lengths // FA3_TILE_QUERIES)
    return "fa3" if int(tiles.sum()) * num_heads >= FA3_FROM_TILES else "fa2"


def graph_groups(rows: int) -> int:
    """Number of groups in a captured cascade of ``rows`` rows.

    A graph's kernels have tiles for the largest possible group, ``rows - groups + 1``: with as many
    groups as rows they would have the smallest tiles, and read shared pages once for each four or
    so queries.
    """
    return min(rows, max(3, rows // 8))


def cascade_pays(
    group_sizes: NDArray[np.integer],
    shared_tokens: NDArray[np.integer],
    spec: AttentionSpec,
    kv_bytes: int,
) -> bool:
    """Reading each shared prefix once saves a layer more time than the cascade costs it.

    Without it every sequence reads the prefix from memory; with it a group reads it once, and
    computes as a prefill does, where arithmetic may take longer than reading.

    Args:
        group_sizes: [groups] decoding sequences that share a prefix.
        shared_tokens: [groups] length of that prefix.
        spec: of the layer.
        kv_bytes: of one number in the cache.
    """
    token_bytes = 2 * spec.num_kv_heads * spec.head_dim * kv_bytes
    token_flops = 4 * spec.num_heads * spec.head_dim  # scores and values, for one query
    reads_alone_s = token_bytes * (group_sizes * shared_tokens) / MEMORY_BYTES_PER_S
    reads_once_s = token_bytes * shared_tokens / MEMORY_BYTES_PER_S
    computes_s = token_flops * (group_sizes * shared_tokens) / ATTENTION_FLOPS_PER_S
    with_cascade_s = np.maximum(reads_once_s, computes_s).sum() + CASCADE_OVERHEAD_S
    return bool(reads_alone_s.sum() > with_cascade_s)
