"""Least-recently-used cache of parts of prompts, bounded by their memory."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

ENTRY_BYTES = 448
"""Memory of an entry beside that of its token ids or text: objects, key, place in the order
(measured: 290 to 440)."""

Value = TypeVar("Value")


class TokenMemory(Generic[Value]):
    """Drops the least recently used values beyond ``capacity_bytes``. Safe to use from several
    threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._kept: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def limit(self, max_bytes: int) -> None:
        """Lower the capacity, if it is higher. Call it while the memory is empty."""
        self._capacity_bytes = min(self._capacity_bytes, max_bytes)

    def keep(self, key: bytes, value: Value, num_bytes: int) -> None:
        """Store a value whose token ids or text take ``num_bytes``, in place of the key's earlier
        one."""
        cost = num_bytes + ENTRY_BYTES
        with self._lock:
            _, old_cost = self._kept.pop(key, (None, 0))
            self._kept[key] = value, cost
            self._used_bytes += cost - old_cost
            while self._used_bytes > self._capacity_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._used_bytes -= dropped
