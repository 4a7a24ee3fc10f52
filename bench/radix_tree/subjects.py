"""The trees under measurement, behind one interface."""

from typing import Any, Protocol

import numpy as np

from bench.radix_tree.mini_sglang import NativeCompareTree
from bench.radix_tree.sglang import TokenListTree
from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.eviction.policy import EvictionPolicy
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.page_allocator import Pages
from radixrt.scheduler.radix.tree import RadixTree

Prompt = Any
"""Tokens in whatever form a tree takes them."""


class Subject(Protocol):
    """A tree that can be measured."""

    def prompt(self, tokens: TokenIds) -> Prompt:
        """Bring tokens into the tree's own form; not part of any measurement."""

    def match(self, prompt: Prompt) -> int:
        """Tokens of the longest cached prefix."""

    def lock(self, prompt: Prompt) -> Any:
        """Look a prompt up and lock what is found."""

    def unlock(self, handle: Any) -> None: ...

    def extend(self, handle: Any, prompt: Prompt, start: int, pages: Pages) -> Any:
        """Insert a prompt whose first ``start`` tokens are cached and locked; returns the new lock.

        Args:
            pages: of the whole prompt.
        """

    def evict(self, count: int) -> int:
        """Free at least ``count`` pages if possible; returns how many were freed."""

    def num_nodes(self) -> int: ...


class Radixrt:
    """The project's own tree."""

    def __init__(self, page_size: int, policy: EvictionPolicy | None = None) -> None:
        self.tree = RadixTree(page_size, policy)

    def prompt(self, tokens: TokenIds) -> TokenIds:
        return tokens

    def match(self, prompt: TokenIds) -> int:
        match = self.tree.match(prompt)
        return 0 if match is None else match.num_pages * self.tree.page_size

    def lock(self, prompt: TokenIds) -> Node:
        match = self.tree.match(prompt)
        return self.tree.lock_root() if match is None else self.tree.lock_match(match)

    def unlock(self, handle: Node) -> None:
        self.tree.unlock(handle)

    def extend(self, handle: Node, prompt: TokenIds, start: int, pages: Pages) -> Node:
        tree = self.tree
        end, _ = tree.insert(handle, prompt[start:], pages[start // tree.page_size :])
        tree.move_lock(handle, end)
        return end

    def evict(self, count: int) -> int:
        return len(self.tree.evict(count))

    def num_nodes(self) -> int:
        return self.tree.num_nodes


class PublishedTree(Protocol):
    """What the re-created designs have in common."""

    page_size: int
    num_nodes: int

    def key(self, tokens: TokenIds) -> Prompt: ...

    def match(self, key: Prompt) -> tuple[int, Any]: ...

    def insert(self, key: Prompt, value: Pages) -> int: ...

    def lock(self, node: Any) -> None: ...

    def unlock(self, node: Any) -> None: ...

    def evict(self, num_tokens: int) -> int: ...


class Published:
    """A re-created design: they insert a whole prompt from its beginning, look it up again and move the lock."""

    def __init__(self, tree: PublishedTree) -> None:
        self.tree = tree

    def prompt(self, tokens: TokenIds) -> Prompt:
        return self.tree.key(tokens)

    def match(self, prompt: Prompt) -> int:
        return self.tree.match(prompt)[0]

    def lock(self, prompt: Prompt) -> Any:
        _, node = self.tree.match(prompt)
        self.tree.lock(node)
        return node

    def unlock(self, handle: Any) -> None:
        self.tree.unlock(handle)

    def extend(self, handle: Any, prompt: Prompt, start: int, pages: Pages) -> Any:
        self.tree.insert(prompt, np.repeat(pages, self.tree.page_size))
        _, node = self.tree.match(prompt)
        self.tree.unlock(handle)
        self.tree.lock(node)
        return node

    def evict(self, count: int) -> int:
        return self.tree.evict(count * self.tree.page_size) // self.tree.page_size

    def num_nodes(self) -> int:
        return self.tree.num_nodes


def make(name: str, page_size: int) -> Subject:
    """A new, empty tree by the name of its design."""
    match name:
        case "radixrt":
            return Radixrt(page_size)
        case "sglang":
            return Published(TokenListTree(page_size))
        case "mini-sglang":
            return Published(NativeCompareTree(page_size))
    raise ValueError(f"{name!r} is no tree of this benchmark; choose among {', '.join(NAMES)}.")


NAMES = ("radixrt", "sglang", "mini-sglang")
