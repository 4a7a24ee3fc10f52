"""Allocates the tensors of the KV cache, and computes how many pages fit into memory."""

import math

import torch

from radixrt.attention.backend import AttentionSetup
from radixrt.attention.cpu import CPU_CACHE_DTYPES
from radixrt.attention.kv_spec import CachedTensor, KVSpec, LayerKV
from radixrt.base.errors import ConfigError
from radixrt.device.machine import (
    CPU_POOL_LIMIT,
    CPU_POOL_SHARE,
    MIN_KEPT_STATES,
    MIN_STATE_ROWS,
    available_memory,
)
from radixrt.worker.kv.shared_memory import SharedMemory, rounded_up
from radixrt_kernels.memory import advise_huge_pages

GIB = 1 << 30


class KVPool:
    """The KV cache of every layer: for each tensor of its :class:`KVSpec` one of [num_pages + 1,
    page_size, *shape]. Keys and values are in FlashInfer's NHD layout.

    The last page is the spare one: no sequence is given it, and padding writes there.
    """

    def __init__(
        self,
        setup: AttentionSetup,
        num_pages: int,
        *,
        one_for_all: bool = False,
        shared: SharedMemory | None = None,
    ) -> None:
        """
        Args:
            setup: the layers' KV caches, and their page size and device.
            shared: memory that outlives this process, in which :func:`shared_bytes` are left.
            one_for_all: layers of one spec share their tensors, which then hold nothing of use: for
                a trial run.
        """
        self.num_pages = num_pages
        self.page_size = setup.page_size
        self.spare_page = num_pages
        self._device = setup.device.torch_device
        self._shared = shared
        specs = setup.page_specs
        if one_for_all:
            of_spec = {spec: self._layer(spec) for spec in set(specs)}
            self.kv_caches = [of_spec[spec] for spec in specs]
        else:
            self.kv_caches = [self._layer(spec) for spec in specs]

    def _layer(self, spec: KVSpec) -> LayerKV:
        return tuple(self._empty(tensor) for tensor in spec.tensors)

    def _empty(self, cached: CachedTensor) -> torch.Tensor:
        shape = (self.num_pages + 1, self.page_size, *cached.shape)
        if self._shared is not None:
            return self._shared.take(shape, cached.dtype)
        tensor = torch.empty(shape, dtype=cached.dtype, device=self._device)
        if self._device.type == "cpu" and cached.dtype in CPU_CACHE_DTYPES:
            advise_huge_pages(tensor)  # one core read pages at random at 13 instead of 8 GB/s
        return tensor


def shared_bytes(setup: AttentionSetup, num_pages: int) -> int:
    """Memory of a pool's tensors, each in whole huge pages."""
    tokens = (num_pages + 1) * setup.page_size
    tensors = [one for spec in setup.page_specs for one in spec.tensors]
    return sum(rounded_up(tokens * math.prod(one.shape) * one.dtype.itemsize) for one in tensors)


def bytes_per_token(setup: AttentionSetup) -> int:
    """KV of one token over all layers, on this rank."""
    return sum(spec.bytes_per_token for spec in setup.page_specs)


def pool_tokens(setup: AttentionSetup, mem_fraction: float) -> int:
    """Tokens of KV for which there is memory now."""
    device = setup.device.torch_device
    return _available_bytes(device, mem_fraction, asked_for=True) // bytes_per_token(setup)


def pool_pages(
    setup: AttentionSetup,
    *,
    mem_fraction: float,
    max_total_tokens: int | None,
    max_useful_tokens: int,
    one_state: int = 0,
) -> int:
    """The number of pages of the pool, without the spare one.

    Args:
        mem_fraction: share of the memory that weights (already there) and pool may fill.
        max_total_tokens: tokens that the user asks for; None: as many as fit, up to
            ``max_useful_tokens``.
        max_useful_tokens: tokens beyond which no request would ever use the pool.
        one_state: bytes of a sequence's state in recurrent layers. Such states are kept in as much
            memory as the KV takes (:func:`kept_states`), beside one for each row of the batch.

    Raises:
        ConfigError: the memory does not hold it.
    """
    device, page_size = setup.device.torch_device, setup.page_size
    page_bytes = page_size * bytes_per_token(setup)
    available = _available_bytes(device, mem_fraction, asked_for=max_total_tokens is not None)
    if one_state:
        page_bytes = max(2 * page_bytes, 1)
        available -= (setup.max_rows + MIN_KEPT_STATES) * one_state
    if max_total_tokens is None:
        wanted_by = "a KV pool of one page"
        pages = min(available // page_bytes, max_useful_tokens // page_size)
    else:
        wanted_by = f"--max-total-tokens {max_total_tokens}"
        pages = max_total_tokens // page_size
        if pages < 1:
            raise ConfigError(
                f"{wanted_by} is less than one page of {page_size} tokens (--page-size)."
            )
    needed = max(1, pages) * page_bytes
    if pages < 1 or needed > available:
        raise ConfigError(
            f"{wanted_by} needs {needed / GIB:.2f} GiB on {device}, and {max(0, available) / GIB:.2f} GiB may be "
            "used: lower --max-total-tokens, --context-length or --max-prefill-tokens, raise --mem-fraction-static, or "
            "free memory."
        )
    return pages


def state_rows(setup: AttentionSetup, mem_fraction: float, one_state: int) -> int:
    """The number of sequences whose states of recurrent layers take a quarter of the memory."""
    device = setup.device.torch_device
    available = _available_bytes(device, mem_fraction, asked_for=False)
    return max(MIN_STATE_ROWS, available // 4 // one_state)


def kept_states(setup: AttentionSetup, pages: int, one_state: int) -> int:
    """The number of states of recurrent layers that are kept beside a pool of so many pages."""
    kv_bytes = pages * setup.page_size * bytes_per_token(setup)
    return min(max(kv_bytes // one_state, MIN_KEPT_STATES), pages)


def _available_bytes(device: torch.device, mem_fraction: float, *, asked_for: bool) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * mem_fraction) - (total - free)
    most = available_memory()
    if not asked_for:
        most = min(CPU_POOL_LIMIT, int(CPU_POOL_SHARE * most))
    return int(most * mem_fraction)
