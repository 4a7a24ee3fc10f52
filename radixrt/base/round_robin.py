"""Round robin over tenants and, of each tenant, over keys: one with many items does not make the
others wait."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class RoundRobin(Generic[Item]):
    """Items that wait, by tenant and key.

    >>> queue = RoundRobin[int]()
    >>> for tenant, item in [("a", 1), ("a", 2), ("b", 3)]:
    ...     queue.push(tenant, "", item)
    >>> [queue.pop() for _ in range(3)]
    [1, 3, 2]
    """

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, deque[Item]]] = {}
        """The items of each tenant and key, in order of arrival. The first tenant and its first key
        are next, and then go to the end."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __len__(self) -> int:
        return sum(self.counts().values())

    def counts(self) -> dict[str, int]:
        """The number of items of each tenant that has some."""
        return {tenant: sum(map(len, keys.values())) for tenant, keys in self._waiting.items()}

    def push(self, tenant: str, key: str, item: Item) -> None:
        self._waiting.setdefault(tenant, {}).setdefault(key, deque()).append(item)

    def pop(self) -> Item:
        """The next item. There must be one."""
        tenant = next(iter(self._waiting))
        keys = self._waiting.pop(tenant)
        key = next(iter(keys))
        items = keys.pop(key)
        item = items.popleft()
        if items:
            keys[key] = items
        if keys:
            self._waiting[tenant] = keys
        return item

    def pop_last(self, tenant: str) -> Item:
        """The item of a tenant that would be its last. There must be one."""
        keys = self._waiting[tenant]
        key = next(reversed(keys))
        item = keys[key].pop()
        if not keys[key]:
            del keys[key]
        if not keys:
            del self._waiting[tenant]
        return item

    def drop(self, is_unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove items; returns them."""
        kept, dropped = RoundRobin[Item](), list[Item]()
        for tenant, keys in self._waiting.items():
            for key, items in keys.items():
                for item in items:
                    if is_unwanted(item):
                        dropped.append(item)
                    else:
                        kept.push(tenant, key, item)
        self._waiting = kept._waiting
        return dropped
