"""An LRU cache bounded by bytes and entries, for compiled constraints."""

import collections
import sys
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key")
Value = TypeVar("Value")


class ByteLru(Generic[Key, Value]):
    """A mapping that drops its least recently used entries.

    Attributes:
        capacity_bytes: most that the values may have together; a larger one is not kept.
        max_entries: most values.
        used_bytes: total size of the entries.
        hits, misses: of :meth:`get`.
    """

    def __init__(self, capacity_bytes: int, max_entries: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_entries = max_entries
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
        while self.used_bytes > self.capacity_bytes or len(self) > self.max_entries:
            _, (_, dropped) = self._entries.popitem(last=False)
            self.used_bytes -= dropped


def memory_of(value: object) -> int:
    """Bytes of a value of structs, containers, texts and numbers, as if no part of it were shared.

    A schema as Python objects takes ten times its JSON.
    """
    num_bytes, pending = 0, [value]
    while pending:
        part = pending.pop()
        num_bytes += sys.getsizeof(part)
        match part:
            case dict():
                pending += [*part.keys(), *part.values()]
            case list() | tuple():
                pending += part
            case msgspec.Struct():
                pending += msgspec.structs.astuple(part)
    return num_bytes
