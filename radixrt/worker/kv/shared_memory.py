"""Places the KV pool in memory that outlives the worker.

The memory is a file without a name (memfd) that the supervisor holds. A worker that is killed
leaves it as it is, and the next one maps it again. It begins with the id of the pool and a digest
of all that its bits depend on; where the digest is another one, the memory is emptied.

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
import torch

from radixrt.base.config import ServerConfig
from radixrt.device.machine import shared_huge_pages

log = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
_HEADER = struct.Struct("<32s32sq")
"""The pool's id, the digest, and the number of pages."""


def wants_shared_memory(config: ServerConfig) -> bool:
    """Whether the settings, and with ``auto`` the system, place the pool in shared memory."""
    if config.shared_kv_pool != "auto":
        return config.shared_kv_pool == "on"
    return shared_huge_pages() in ("advise", "within_size", "always", "force")


class SharedMemory:
    """Memory of the supervisor for the tensors of a KV pool.

    Args:
        fd: of the memory, which this object owns from now on.
        parts: what the bits of the KV depend on, by name.
    """

    def __init__(self, fd: int, parts: dict[str, str]) -> None:
        self._fd = fd
        self._digest = hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).digest()
        pool_id, digest, num_pages = _HEADER.unpack(
            os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        )
        is_kept = digest == self._digest
        self.pool_id: str = pool_id.decode() if is_kept else ""
        """Random; "": no pool was begun."""
        self.num_pages: int = num_pages if is_kept else 0
        """Of the pool that a dead worker has left; 0: there is none."""
        self._at = HUGE_PAGE
        if not is_kept:
            os.ftruncate(fd, 0)

    def begin(self, num_pages: int, num_bytes: int) -> None:
        """Take the memory for a pool, unless it is there.

        Args:
            num_bytes: of all tensors, each rounded up to :data:`HUGE_PAGE`.

        Raises:
            OSError: the system gives no memory.
        """
        size = HUGE_PAGE + num_bytes
        if not self.pool_id or os.fstat(self._fd).st_size != size:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, size)
            self.pool_id = secrets.token_hex(16)
            header = _HEADER.pack(self.pool_id.encode(), self._digest, num_pages)
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
