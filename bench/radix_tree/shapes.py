"""What the measured trees hold: a forest around the prompt in question, and trees to be weighed."""

from collections.abc import Callable, Iterator

import numpy as np

from radixrt.messages import TokenIds

VOCABULARY = 100_000
CHUNK = 2048
"""Tokens of a prompt that enter the tree at once."""
LEAVES = 31
"""Continuations of each document of the forest."""


def random_tokens(rng: np.random.Generator, count: int) -> TokenIds:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def documents(num_nodes: int, page_size: int, seed: int = 0) -> Iterator[TokenIds]:
    """Documents of 32 pages, each with 31 questions of 4 pages: about ``num_nodes`` nodes."""
    rng = np.random.default_rng(seed)
    for _ in range(max(1, num_nodes // (LEAVES + 1))):
        document = random_tokens(rng, 32 * page_size)
        for _ in range(LEAVES):
            yield np.concatenate((document, random_tokens(rng, 4 * page_size)))


def one_page_leaves(num_nodes: int, page_size: int, seed: int = 0) -> Iterator[TokenIds]:
    """Prompts of one page that share nothing: the most nodes that pages can make, and the widest."""
    rng = np.random.default_rng(seed)
    if page_size == 1:
        yield from rng.permutation(num_nodes).astype(np.int32)[:, None]
        return
    for _ in range(num_nodes):
        yield random_tokens(rng, page_size)


def one_page_forks(num_nodes: int, page_size: int, seed: int = 0) -> Iterator[TokenIds]:
    """Every page is followed by two others: the most nodes that pages can make, and the deepest."""
    rng = np.random.default_rng(seed)
    depth = max(1, int(num_nodes + 2).bit_length() - 2)
    pages = rng.permutation(VOCABULARY)[: 2 * depth * page_size].astype(np.int32)
    pages = pages.reshape(depth, 2, page_size)
    for leaf in range(1 << depth):
        turns = (leaf >> np.arange(depth)) & 1
        yield pages[np.arange(depth), turns].ravel()


SHAPES: dict[str, Callable[[int, int], Iterator[TokenIds]]] = {
    "documents": documents,
    "one-page leaves": one_page_leaves,
    "one-page forks": one_page_forks,
}
