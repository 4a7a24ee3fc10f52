"""What the measured trees hold: a forest around the prompt in question, and trees to be weighed."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from radixrt.bench.cache.trace import BLOCK_TOKENS, read_trace
from radixrt.messages.ids import TokenIds

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


MAX_RECORDED_PAGES = 1_000_000


def recorded(trace: Path, page_size: int) -> Iterator[TokenIds]:
    """The prompts of a trace, until they have a million different pages; tokens are the numbers of blocks and places."""
    blocks: set[int] = set()
    places = np.arange(BLOCK_TOKENS)
    for request in read_trace(trace).requests:
        tokens = (request.blocks[:, None] * BLOCK_TOKENS + places) % (1 << 31)
        end = request.input_tokens // page_size * page_size
        if end:
            yield tokens.ravel()[:end].astype(np.int32)
        blocks.update(request.blocks.tolist())
        if len(blocks) * BLOCK_TOKENS >= MAX_RECORDED_PAGES * page_size:
            return


def prompts(shape: str, num_nodes: int, page_size: int) -> Iterator[TokenIds]:
    """Of one of :data:`SHAPES`, or of the trace in that file."""
    if shape in SHAPES:
        return SHAPES[shape](num_nodes, page_size)
    return recorded(Path(shape), page_size)


SHAPES: dict[str, Callable[[int, int], Iterator[TokenIds]]] = {
    "documents": documents,
    "one-page leaves": one_page_leaves,
    "one-page forks": one_page_forks,
}
