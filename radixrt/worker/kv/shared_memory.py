"""Places the KV pool and the kept states of recurrent layers in memory that outlives the worker.

The memory is a file without a name (memfd) that the supervisor holds, one for each rank. A worker
that is killed leaves it as it is, and the next one maps it again. It begins with the id of the pool
and a digest of all that its bits depend on. Where the digest is another one, or the ranks do not
have the same pool, the memory is emptied.

Only with pages of 2 MiB: one core reads pages of the pool at random a third slower without them.
Few systems give them to shared memory by default (``shmem_enabled``).
"""

import hashlib
import logging
import mmap
import os
import secrets
import struct

import msgspec
import numpy as np
import torch

from radixrt.base.config import ServerConfig
from radixrt.device.machine import shared_huge_pages
from radixrt.layers.parallel import TensorParallel

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
_HEADER = struct.Struct("<32s32sqq")
"""The pool's id, the digest, and the numbers of pages and slots."""
_EMPTY = bytes(_HEADER.size)


def wants_shared_memory(config: ServerConfig) -> bool:
    """Whether the settings, and with ``auto`` the system, place the pool in shared memory."""
    if config.shared_kv_pool != "auto":
        return config.shared_kv_pool == "on"
    return shared_huge_pages() in ("advise", "within_size", "always", "force")


class SharedMemory:
    """Memory of the supervisor for the tensors of a KV pool and of kept states.

    Args:
        fd: of the memory, which this object owns from now on.
        parts: what the bits of the KV depend on, by name.
        tp: the ranks, which use their pools together or not at all.
    """

    def __init__(self, fd: int, parts: dict[str, str], tp: TensorParallel) -> None:
        self._fd, self._tp = fd, tp
        self._digest = hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).digest()
        header = os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        is_kept = _HEADER.unpack(header)[1] == self._digest
        if not tp.agree(header if is_kept else _EMPTY) or not is_kept:
            header = _EMPTY
            os.ftruncate(fd, 0)
        pool_id, _, num_pages, num_slots = _HEADER.unpack(header)
        self.pool_id: str = pool_id.rstrip(b"\0").decode()
        """Random, the same on every rank; "": no pool was begun."""
        self.num_pages: int = num_pages
        """Of the pool that a dead worker has left; 0: there is none."""
        self.num_slots: int = num_slots
        """Of the dead worker, whose states come before the kept ones."""
        self._at = HUGE_PAGE

    def begin(self, num_pages: int, num_slots: int, num_bytes: int) -> None:
        """Take the memory for a pool, unless it is there.

        Args:
            num_bytes: of all tensors, each rounded up to :data:`HUGE_PAGE`.

        Raises:
            OSError: the system gives no memory.
        """
        size = HUGE_PAGE + num_bytes
        if not self.pool_id:
            os.ftruncate(self._fd, size)
            new = np.frombuffer(secrets.token_hex(16).encode(), dtype=np.uint8)
            self.pool_id = self._tp.from_first(new).tobytes().decode()
            header = _HEADER.pack(self.pool_id.encode(), self._digest, num_pages, num_slots)
            os.pwrite(self._fd, header, 0)
        self._memory = mmap.mmap(self._fd, size)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor, with what the same call of a dead worker has left in it."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        start, self._at = self._at, self._at + rounded_up(num_bytes)
        if hasattr(self._memory, "madvise") and self._at > start:
            self._memory.madvise(mmap.MADV_HUGEPAGE, start, self._at - start)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes, offset=start)
        return flat.view(dtype).view(shape)


def rounded_up(num_bytes: int) -> int:
    """Bytes in whole huge pages."""
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
