"""Two upper bounds of the hit rate, for prompts that arrive in a given order, one at a time.

*Infinite cache*: nothing is ever evicted. *Belady on leaves*: of the unused pages, the one whose
next use lies farthest ahead is evicted first (Belady, 1966). A page is used at least as early as
its continuations, so the farthest page is always the tail of a leaf. Eviction of leaves only is
therefore no restriction.

Both take the rules of the engine: whole pages are shared, and the last token of a prompt is always
computed. Answers take room while they are written and none afterwards; requests do not overlap. So
no eviction policy that admits in this order finds more, and a policy that changes the order (a
queue by prefix length does) has another bound.
"""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixrt.bench.cache.trace import BLOCK_TOKENS, TraceRequest

NEVER = np.iinfo(np.int64).max


def infinite_cache(requests: Sequence[TraceRequest]) -> list[int]:
    """Tokens of each prompt, in order, that an earlier prompt began with."""
    seen: set[int] = set()
    hits = []
    for request in requests:
        pages = _full_pages(request)
        new = [page not in seen for page in pages.tolist()]
        found = new.index(True) if True in new else len(new)
        seen.update(pages.tolist())
        hits.append(_tokens(found, request))
    return hits


def belady(requests: Sequence[TraceRequest], num_pages: int) -> list[int]:
    """Cached tokens of each prompt, in order, with a pool of ``num_pages`` pages of one block each.

    The cache is kept as a count of pages for each next use: the pages whose next use is request
    ``t`` are all on the path of ``t``, so ``t`` finds as many pages as its count says. Evicting
    from the latest count takes a path's pages from its end.
    """
    next_uses = _next_uses(requests)
    cached: dict[int, int] = {}
    """Pages in the cache by the request that uses them next; those never used again are dropped at
    once."""
    latest: list[int] = []
    total = 0
    hits = []
    for number, request in enumerate(requests):
        found = cached.pop(number, 0)
        total -= found
        hits.append(_tokens(found, request))
        used = -(-(request.input_tokens + request.output_tokens) // BLOCK_TOKENS)
        total -= _drop_latest(cached, latest, total + used - num_pages)
        for use, count in zip(*np.unique(next_uses[number], return_counts=True), strict=True):
            if use != NEVER:
                if int(use) not in cached:
                    heapq.heappush(latest, -int(use))
                cached[int(use)] = cached.get(int(use), 0) + int(count)
                total += int(count)
    return hits


def _drop_latest(cached: dict[int, int], latest: list[int], excess: int) -> int:
    """Evict ``excess`` pages (if that is positive), those used last first; returns how many
    went."""
    dropped = 0
    while dropped < excess and latest:
        use = -latest[0]
        count = cached.get(use, 0)
        taken = min(count, excess - dropped)
        dropped += taken
        if taken == count:
            heapq.heappop(latest)
            cached.pop(use, None)
        else:
            cached[use] = count - taken
    return dropped


def _next_uses(requests: Sequence[TraceRequest]) -> list[NDArray[np.int64]]:
    """For each prompt, for each of its pages, the next request that has it."""
    next_use = np.full(max(int(r.blocks.max(initial=0)) for r in requests) + 1, NEVER)
    uses = []
    for number in range(len(requests) - 1, -1, -1):
        pages = _full_pages(requests[number])
        uses.append(next_use[pages])
        next_use[pages] = number
    return uses[::-1]


def _full_pages(request: TraceRequest) -> NDArray[np.int64]:
    return request.blocks[: request.input_tokens // BLOCK_TOKENS]


def _tokens(found: int, request: TraceRequest) -> int:
    """Tokens of the first ``found`` pages, of which the page with the last token does not count."""
    return min(found, (request.input_tokens - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
