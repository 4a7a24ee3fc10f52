"""The tensors that hold the KV cache, and how large they may be."""

from pathlib import Path

import torch

from radixrt.attention.backend import KVCache
from radixrt.attention.setup import AttentionSetup
from radixrt.base.errors import ConfigError
from radixrt_kernels.memory import advise_huge_pages

GIB = 1 << 30
CPU_POOL_SHARE = 0.5
"""On a CPU other programs want memory too: the pool takes at most this share of what is available."""
CPU_POOL_LIMIT = 8 * GIB


class KVPool:
    """One K and one V tensor a layer, [num_pages + 1, page_size, num_kv_heads, head_dim]: FlashInfer's NHD layout.

    The last page is the spare one: no sequence is given it, and padding writes there.
    """

    def __init__(self, setup: AttentionSetup, num_pages: int, *, one_for_all: bool = False) -> None:
        """
        Args:
            setup: which layers there are, and the dtype, page size and device of their cache.
            one_for_all: layers of one shape share their tensors, which then hold nothing of use: for a trial run.
        """
        self.num_pages = num_pages
        self.page_size = setup.page_size
        self.spare_page = num_pages
        shapes = [
            (num_pages + 1, self.page_size, spec.num_kv_heads, spec.head_dim)
            for spec in setup.specs
        ]
        if one_for_all:
            of_shape = {shape: _pair(shape, setup) for shape in set(shapes)}
            self.kv_caches = [of_shape[shape] for shape in shapes]
        else:
            self.kv_caches = [_pair(shape, setup) for shape in shapes]


def _pair(shape: tuple[int, ...], setup: AttentionSetup) -> KVCache:
    return _empty(shape, setup), _empty(shape, setup)


def _empty(shape: tuple[int, ...], setup: AttentionSetup) -> torch.Tensor:
    dtype, device = setup.kv_dtype, setup.device.torch_device
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu" and dtype.is_floating_point and dtype.itemsize > 1:
        advise_huge_pages(tensor)  # one core read pages at random at 13 instead of 8 GB/s
    return tensor


def bytes_per_token(setup: AttentionSetup) -> int:
    """KV of one token over all layers, on this rank."""
    itemsize = setup.kv_dtype.itemsize
    return sum(2 * spec.num_kv_heads * spec.head_dim * itemsize for spec in setup.specs)


def pool_pages(
    setup: AttentionSetup,
    *,
    mem_fraction: float,
    max_total_tokens: int | None,
    max_useful_tokens: int,
) -> int:
    """How many pages the pool has.

    Args:
        mem_fraction: share of the memory that weights (already there) and pool may fill.
        max_total_tokens: the user's own wish, in tokens.
        max_useful_tokens: more than this many tokens are never asked for by default.

    Raises:
        ConfigError: the memory does not hold it.
    """
    device, page_size, token_bytes = (
        setup.device.torch_device, setup.page_size, bytes_per_token(setup)
    )  # fmt: skip
    available = _available_bytes(device, mem_fraction)
    if max_total_tokens is not None:
        tokens, wanted_by = max_total_tokens, f"--max-total-tokens {max_total_tokens}"
    else:
        tokens, wanted_by = (
            min(available // token_bytes, max_useful_tokens),
            "a KV pool of one page",
        )
    pages = tokens // page_size
    needed = max(1, pages) * page_size * token_bytes
    if pages < 1 and max_total_tokens is not None:
        raise ConfigError(f"{wanted_by} is less than one page of {page_size} tokens (--page-size).")
    if pages < 1 or needed > available:
        raise ConfigError(
            f"{wanted_by} needs {needed / GIB:.2f} GiB on {device}, and {max(0, available) / GIB:.2f} GiB may be "
            "used: lower --max-total-tokens, --context-length or --max-prefill-tokens, raise --mem-fraction-static, or "
            "free memory."
        )
    return pages


def _available_bytes(device: torch.device, mem_fraction: float) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * mem_fraction) - (total - free)
    return int(min(CPU_POOL_LIMIT, CPU_POOL_SHARE * _available_host_bytes()) * mem_fraction)


def _available_host_bytes() -> int:
    """Memory that could be had without swapping: MemAvailable and the cgroup's limit, whichever is less."""
    available = 4 * GIB  # where the system does not tell
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(
            line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line
        )
        available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available
