"""What is remembered of token ids, as long as there is room?"""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

ENTRY_COST = 80
"""What an entry takes in memory beside its token ids counts as so many of them."""

Value = TypeVar("Value")


class TokenMemory(Generic[Value]):
    """What was used last, up to a number of token ids. Safe to use from several threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._num_kept = 0
        """Of the capacity, what is used."""
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
        """In place of what this key had before."""
        cost = num_ids + ENTRY_COST
        with self._lock:
            _, old_cost = self._kept.pop(key, (None, 0))
            self._kept[key] = value, cost
            self._num_kept += cost - old_cost
            while self._num_kept > self._capacity:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._num_kept -= dropped
