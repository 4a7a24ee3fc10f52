"""mini-sglang's radix cache as it is described, written anew for comparison.

What makes it up: edges are arrays of token ids; children sit in a dictionary by the tuple of the first page; keys are
compared natively (numpy stands in for its C++ function); each node on the way gets a time stamp; a lookup that ends
inside an edge splits it; eviction walks the whole tree for its unlocked leaves, makes a heap of them and
drops whole leaves. Values are one slot a token.
"""

import heapq
import time

import numpy as np

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.page_allocator import Pages


class _Node:
    def __init__(self, key: TokenIds, value: Pages, parent: "_Node | None") -> None:
        self.children: dict[tuple[int, ...], _Node] = {}
        self.parent = parent
        self.key = key
        self.value = value
        self.locks = 0
        self.last_access = time.monotonic_ns()

    def __lt__(self, other: "_Node") -> bool:
        return self.last_access < other.last_access


class NativeCompareTree:
    """Longest prefixes of token arrays."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        empty = np.empty(0, np.int32)
        self._root = _Node(empty, empty, None)
        self._root.locks = 1
        self.evictable = 0
        self.num_nodes = 0

    def key(self, tokens: TokenIds) -> TokenIds:
        return tokens

    def _child_key(self, key: TokenIds) -> tuple[int, ...]:
        return tuple(key[: self.page_size].tolist())

    def _common(self, edge: TokenIds, key: TokenIds) -> int:
        length = min(len(edge), len(key))
        differs = edge[:length] != key[:length]
        first = int(differs.argmax())
        return (first if differs[first] else length) // self.page_size * self.page_size

    def _walk(self, key: TokenIds) -> tuple[int, _Node]:
        node, found, now = self._root, 0, time.monotonic_ns()
        while found < len(key):
            child = node.children.get(self._child_key(key[found:]))
            if child is None:
                break
            node = child
            node.last_access = now
            common = self._common(node.key, key[found:])
            found += common
            if common < len(node.key):
                return found, self._split(node, common)
        return found, node

    def match(self, key: TokenIds) -> tuple[int, _Node]:
        found, end = self._walk(key)
        values, node = [], end
        while node.parent is not None:
            values.append(node.value)
            node = node.parent
        if values:
            np.concatenate(values[::-1])  # its lookup returns the slots
        return found, end

    def insert(self, key: TokenIds, value: Pages) -> int:
        found, node = self._walk(key)
        if found < len(key):
            leaf = _Node(key[found:].copy(), value[found:].copy(), node)
            node.children[self._child_key(leaf.key)] = leaf
            self.evictable += len(leaf.key)
            self.num_nodes += 1
        return found

    def _split(self, child: _Node, length: int) -> _Node:
        parent = child.parent
        assert parent is not None
        upper = _Node(child.key[:length], child.value[:length], parent)
        upper.locks, upper.last_access = child.locks, child.last_access
        parent.children[self._child_key(upper.key)] = upper
        child.key, child.value, child.parent = child.key[length:], child.value[length:], upper
        upper.children[self._child_key(child.key)] = child
        self.num_nodes += 1
        return upper

    def lock(self, node: _Node) -> None:
        while node.parent is not None:
            if node.locks == 0:
                self.evictable -= len(node.key)
            node.locks += 1
            node = node.parent

    def unlock(self, node: _Node) -> None:
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable += len(node.key)
            node = node.parent

    def evict(self, num_tokens: int) -> int:
        leaves = self._unlocked_leaves()
        heapq.heapify(leaves)
        freed = 0
        while freed < num_tokens and leaves:
            leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            freed += len(leaf.key)
            self.evictable -= len(leaf.key)
            self.num_nodes -= 1
            del parent.children[self._child_key(leaf.key)]
            if not parent.children and parent.locks == 0:
                heapq.heappush(leaves, parent)
        return freed

    def _unlocked_leaves(self) -> list[_Node]:
        leaves, pending = [], [self._root]
        while pending:
            node = pending.pop()
            if node.children:
                pending.extend(node.children.values())
            elif node.locks == 0:
                leaves.append(node)
        return leaves
