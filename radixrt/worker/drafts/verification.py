"""Finds the draft tokens that the sampler has drawn too.

A draft is verified by drawing at each of its rows as if the tokens before it were final. The noise
of a draw depends on seed, position and token alone, so the token drawn at a row is the one that
would have been drawn there without a draft. As long as it is the draft's next token, the row behind
it stands on the right tokens, and its token is final too.
"""

import numpy as np
from numpy.typing import NDArray

NO_DRAFT = -1
"""Stands in place of a draft token where none follows."""


def first_rows(drafted: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[rows] whether a row is the first of its slot.

    Args:
        drafted: [rows] the draft token behind each row, NO_DRAFT behind the last of a slot.
    """
    return np.concatenate(([True], drafted[:-1] == NO_DRAFT))[: len(drafted)]


def rows_to_keep(
    token_ids: NDArray[np.int64], drafted: NDArray[np.int64], unfilled: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The rows whose tokens are final, in order: of each slot, the first and those behind accepted
    drafts.

    Of the drafts 5, 6, 7 the sampler has drawn 5 and 6, and then another token; a second slot has
    none:

    >>> nothing = np.empty(0, np.int64)
    >>> rows_to_keep(np.array([5, 6, 9, 7, 3]), np.array([5, 6, 7, -1, -1]), nothing).tolist()
    [0, 1, 2, 4]

    Args:
        token_ids: [rows] drawn.
        drafted: [rows] see :func:`first_rows`.
        unfilled: rows of drafts that could not be masked, so that their tokens are not to be used.
    """
    first = first_rows(drafted)
    breaks = np.zeros(len(drafted), dtype=bool)
    breaks[1:] = ~first[1:] & (token_ids[:-1] != drafted[:-1])
    breaks[unfilled] = True
    broken = np.cumsum(breaks)
    starts = np.flatnonzero(first)
    lengths = np.diff(np.append(starts, len(drafted)))
    return np.flatnonzero(broken == np.repeat(broken[starts], lengths))


def tokens_before(
    slots_rows: NDArray[np.int64], drafted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The draft tokens before each of some rows, which penalties count.

    >>> rows, token_ids = tokens_before(np.array([0, 1, 2]), np.array([5, 6, -1]))
    >>> rows.tolist(), token_ids.tolist()
    ([1, 2, 2], [5, 5, 6])

    Args:
        slots_rows: [n] rows, ascending.
        drafted: [rows] see :func:`first_rows`.

    Returns:
        indices into ``slots_rows``, one for each token, and the tokens.
    """
    starts = np.maximum.accumulate(np.where(first_rows(drafted), np.arange(len(drafted)), 0))
    counts = (slots_rows - starts[slots_rows]).astype(np.int64)
    ends = np.cumsum(counts)
    rank = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
    return np.repeat(np.arange(len(slots_rows)), counts), drafted[
        np.repeat(starts[slots_rows], counts) + rank
    ]
