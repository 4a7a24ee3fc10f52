"""SGLang's radix cache as it is described, written anew for comparison.

What makes it up: edges are Python lists of token ids; children sit in a dictionary by the first token, or by the tuple
of the first page; keys are compared in Python, token by token or page by page; the rest of the key is sliced off
at each node; every node on the way gets a time stamp; a lookup that ends inside an edge splits it; eviction
collects all leaves of the tree, makes a heap of them and drops whole leaves. Values are one slot a token.
"""

import heapq
import time
from collections import defaultdict

import numpy as np

from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.page_allocator import Pages

Key = list[int]


class _Node:
    def __init__(self) -> None:
        self.children: dict[object, _Node] = defaultdict(_Node)
        self.parent: _Node | None = None
        self.key: Key = []
        self.value: Pages = np.empty(0, np.int32)
        self.locks = 0
        self.last_access = time.monotonic()

    def __lt__(self, other: "_Node") -> bool:
        return self.last_access < other.last_access


class TokenListTree:
    """Longest prefixes of token lists."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._root = _Node()
        self._root.locks = 1
        self.evictable = 0
        self.num_nodes = 0

    def key(self, tokens: TokenIds) -> Key:
        return tokens.tolist()

    def _child_key(self, key: Key) -> object:
        return key[0] if self.page_size == 1 else tuple(key[: self.page_size])

    def _common(self, edge: Key, key: Key) -> int:
        count, size = 0, self.page_size
        if size == 1:
            for ours, theirs in zip(edge, key, strict=False):
                if ours != theirs:
                    break
                count += 1
            return count
        least = min(len(edge), len(key))
        while count < least and edge[count : count + size] == key[count : count + size]:
            count += size
        return count

    def match(self, key: Key) -> tuple[int, _Node]:
        node, found, values = self._root, 0, []
        node.last_access = time.monotonic()
        while key and (child_key := self._child_key(key)) in node.children:
            child = node.children[child_key]
            child.last_access = time.monotonic()
            common = self._common(child.key, key)
            found += common
            if common < len(child.key):
                node = self._split(child, common)
                values.append(node.value)
                break
            values.append(child.value)
            node, key = child, key[common:]
        if values:
            np.concatenate(values)  # its lookup returns the slots
        return found, node

    def insert(self, key: Key, value: Pages) -> int:
        node, found = self._root, 0
        node.last_access = time.monotonic()
        while key and (child_key := self._child_key(key)) in node.children:
            node = node.children[child_key]
            node.last_access = time.monotonic()
            common = self._common(node.key, key)
            found += common
            key, value = key[common:], value[common:]
            if common < len(node.key):
                node = self._split(node, common)
        if key:
            leaf = _Node()
            leaf.parent, leaf.key, leaf.value = node, key, value.copy()
            node.children[self._child_key(key)] = leaf
            self.evictable += len(key)
            self.num_nodes += 1
        return found

    def _split(self, child: _Node, length: int) -> _Node:
        upper, parent = _Node(), child.parent
        assert parent is not None
        upper.parent, upper.locks = parent, child.locks
        upper.key, upper.value = child.key[:length], child.value[:length]
        upper.children[self._child_key(child.key[length:])] = child
        child.parent, child.key, child.value = upper, child.key[length:], child.value[length:]
        parent.children[self._child_key(upper.key)] = upper
        self.num_nodes += 1
        return upper

    def lock(self, node: _Node) -> None:
        while node is not self._root and node.parent is not None:
            if node.locks == 0:
                self.evictable -= len(node.key)
            node.locks += 1
            node = node.parent

    def unlock(self, node: _Node) -> None:
        while node is not self._root and node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.evictable += len(node.key)
            node = node.parent

    def evict(self, num_tokens: int) -> int:
        leaves = self._leaves()
        heapq.heapify(leaves)
        freed = 0
        while freed < num_tokens and leaves:
            leaf = heapq.heappop(leaves)
            if leaf is self._root or leaf.locks > 0:
                continue
            parent = leaf.parent
            assert parent is not None
            freed += len(leaf.value)
            self.evictable -= len(leaf.value)
            self.num_nodes -= 1
            del parent.children[self._child_key(leaf.key)]
            if not parent.children:
                heapq.heappush(leaves, parent)
        return freed

    def _leaves(self) -> list[_Node]:
        leaves, pending = [], [self._root]
        while pending:
            node = pending.pop()
            if node.children:
                pending.extend(node.children.values())
            else:
                leaves.append(node)
        return leaves
