"""Measures the radix tree alone: ``python -m bench.radix_tree [--nodes 100000] [--tokens 10000
100000] [--page-sizes 1 16]``.

The table has microseconds of each operation, medians of interleaved rounds of the policies, on a
tree of documents that also holds one prompt: as a *chain* of chunks, or with *branches* beside every
chunk.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import product
from statistics import median

import numpy as np

from bench.markdown import markdown
from radixrt.base.settings.setting import EvictionPolicyName
from radixrt.messages.ids import TokenIds
from radixrt.scheduler.radix.eviction import POLICIES, make_policy
from radixrt.scheduler.radix.node import Node
from radixrt.scheduler.radix.return_hazards import NUM_CLASSES, Visit
from radixrt.scheduler.radix.tree import RadixTree

VOCABULARY = 100_000
CHUNK = 2048
"""Tokens of a prompt that enter the tree at once."""
LEAVES = 31
"""Continuations of each document."""
EVICTED = 16
"""Pages that an eviction frees."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.radix_tree", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100_000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["value", "lru"])
    arguments = parser.parse_args()
    sizes = [(page_size, nodes) for page_size in arguments.page_sizes for nodes in arguments.nodes]
    rows = []
    for (page_size, nodes), tokens, shape in product(
        sizes, arguments.tokens, ("chain", "branches")
    ):
        trees = [
            Measured(policy, page_size, nodes, tokens, shape == "branches")
            for policy in arguments.policies
        ]
        for policy, seen in zip(arguments.policies, medians(trees, arguments.rounds), strict=True):
            size = {"page": page_size, "nodes": nodes, "tokens": tokens, "prompt": shape}
            rows.append(size | {"policy": policy} | seen)
    print("\n".join(markdown(rows)))


def random_tokens(rng: np.random.Generator, count: int) -> TokenIds:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def documents(num_nodes: int, page_size: int) -> Iterator[TokenIds]:
    """Documents of 32 pages, each with 31 questions of 4 pages: about ``num_nodes`` nodes."""
    rng = np.random.default_rng(0)
    for _ in range(max(1, num_nodes // (LEAVES + 1))):
        document = random_tokens(rng, 32 * page_size)
        for _ in range(LEAVES):
            yield np.concatenate((document, random_tokens(rng, 4 * page_size)))


def lock(tree: RadixTree, tokens: TokenIds) -> tuple[Node, int]:
    """The locked end of the cached prefix, and its number of tokens."""
    match = tree.match(tokens)
    if match is None:
        return tree.lock_root(), 0
    return tree.lock_match(match), match.num_pages * tree.page_size


def extend(tree: RadixTree, node: Node, tokens: TokenIds) -> Node:
    """Insert tokens behind a locked node; returns the new end, which is locked in its place."""
    pages = np.arange(len(tokens) // tree.page_size, dtype=np.int32)
    end, _ = tree.insert(node, tokens, pages)
    tree.move_lock(node, end)
    return end


def insert(tree: RadixTree, tokens: TokenIds, visit: Visit | None = None) -> None:
    """Insert a prompt."""
    node, cached = lock(tree, tokens)
    end = extend(tree, node, tokens[cached:]) if cached < len(tokens) else node
    end.visit = visit
    tree.unlock(end)


class Measured:
    """A tree with a prompt, and operations that leave it about as it was."""

    def __init__(
        self, policy: EvictionPolicyName, page_size: int, nodes: int, tokens: int, branches: bool
    ) -> None:
        self.rng = np.random.default_rng(1)
        self.tree = RadixTree(page_size, make_policy(policy, time.monotonic))
        for number, document in enumerate(documents(nodes, page_size)):
            kind = number % NUM_CLASSES  # of all classes of odds
            insert(self.tree, document, Visit(kind=kind))
        self.prompt = random_tokens(self.rng, tokens // page_size * page_size)
        self.stranger = random_tokens(self.rng, len(self.prompt))
        for end in range(CHUNK, len(self.prompt) + CHUNK, CHUNK):
            insert(self.tree, self.prompt[:end])
            if branches and end < len(self.prompt):
                aside = random_tokens(self.rng, page_size)
                insert(self.tree, np.concatenate((self.prompt[:end], aside)))

    def round(self) -> dict[str, float]:
        """Microseconds of each operation, once."""
        tree = self.tree
        return {
            "match": _microseconds(lambda: tree.match(self.prompt)),
            "match miss": _microseconds(lambda: tree.match(self.stranger)),
            "lock + unlock": _microseconds(lambda: tree.unlock(lock(tree, self.prompt)[0])),
            "insert page": self._insert(tree.page_size),
            "insert chunk": self._insert(CHUNK),
            f"evict {EVICTED}": _microseconds(lambda: tree.evict(EVICTED)),
        }

    def _insert(self, count: int) -> float:
        """A continuation of the locked prompt."""
        tokens, (node, _) = random_tokens(self.rng, count), lock(self.tree, self.prompt)
        ends: list[Node] = []
        spent = _microseconds(lambda: ends.append(extend(self.tree, node, tokens)))
        self.tree.unlock(ends[0])
        return spent


def _microseconds(operation: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    operation()
    return (time.perf_counter_ns() - begin) / 1000


def medians(trees: list[Measured], rounds: int) -> Iterator[dict[str, str]]:
    """Of each tree, in interleaved rounds."""
    for seen in zip(*[[tree.round() for tree in trees] for _ in range(rounds)], strict=True):
        yield {f"{name}, µs": f"{median(each[name] for each in seen):.1f}" for name in seen[0]}


if __name__ == "__main__":
    main()
