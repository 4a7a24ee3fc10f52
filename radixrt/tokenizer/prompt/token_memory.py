"""Least-recently-used cache of values with token ids, bounded by their number."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

ENTRY_COST = 80
"""Memory of an entry beside its token ids, counted in token ids."""

Value = TypeVar("Value")


class TokenMemory(Generic[Value]):
    """Drops the least recently used values beyond ``capacity`` token ids. Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._num_kept = 0
        """Used part of the capacity."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def keep(self, key: bytes, value: Value, num_ids: int) -> None:
        """Store a value with ``num_ids`` token ids, in place of the key's earlier one."""
        cost = num_ids + ENTRY_COST
        with self._lock:
            _, old_cost = self._kept.pop(key, (None, 0))
            self._kept[key] = value, cost
            self._num_kept += cost - old_cost
            while self._num_kept > self._capacity:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._num_kept -= dropped
