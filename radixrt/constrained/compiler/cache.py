"""An LRU cache bounded by bytes, for compiled constraints."""

import collections
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class ByteLru(Generic[Key, Value]):
    """A mapping that drops its least recently used entries.

    Attributes:
        capacity_bytes: most that the values may have together; a larger one is not kept.
        used_bytes: what they have.
        hits, misses: of :meth:`get`.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: collections.OrderedDict[Key, tuple[Value, int]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep a value, in place of the one of the same key."""
        _, before = self._entries.pop(key, (None, 0))
        self.used_bytes -= before
        if num_bytes > self.capacity_bytes:
            return
        self._entries[key] = (value, num_bytes)
        self.used_bytes += num_bytes
        while self.used_bytes > self.capacity_bytes:
            _, (_, dropped) = self._entries.popitem(last=False)
            self.used_bytes -= dropped
