"""Finds the placeholders of images in a step, and the positions of tokens around images that count
in three axes (M-RoPE, Wang et al., 2024).

An image of h x w placeholders takes max(h, w) positions, not h * w: what is behind it has a smaller
position than its place in the cache. What is computed depends on the images before a place alone:
it is the same for any chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.images import ImageKey, ImageRun


@dataclass(frozen=True, slots=True)
class ImagePart:
    """Placeholders of an image among the tokens of a step."""

    image: ImageKey
    row: int
    """Index of the first into the flat batch."""
    first: int
    """Row of the image's features for it."""
    num_tokens: int
    axes: NDArray[np.int64] | None = None
    """[3, num_tokens] their positions in time, height and width; None: those of the step."""


def image_parts(runs: Sequence[ImageRun], start: int, num_tokens: int, row: int) -> list[ImagePart]:
    """The placeholders among consecutive tokens of a prompt.

    Args:
        runs: the images of the prompt, in order.
        start: place of the first token in the cache.
        row: of it in the flat batch.
    """
    parts = []
    for index, run in enumerate(runs):
        first = max(run.start, start)
        end = min(run.start + run.num_tokens, start + num_tokens)
        if first < end:
            axes = axes_of(runs, index, first, end) if run.columns else None
            feature = run.first + first - run.start
            parts.append(ImagePart(run.image, row + first - start, feature, end - first, axes))
    return parts


def positions_less(runs: Sequence[ImageRun], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """By how much the position of each token is smaller than its place in the cache: [n]

    >>> positions_less([ImageRun(b"", 2, 6, columns=3)], np.arange(1, 10)).tolist()
    [0, 0, 0, 0, 0, 0, 0, 3, 3]

    Args:
        runs: the images of the prompt, in order.
        places: [n] of the tokens.
    """
    less = np.zeros(len(places), dtype=np.int64)
    for run in runs:
        less += run.positions_less * (places >= run.start + run.num_tokens)
    return less


def axes_of(runs: Sequence[ImageRun], index: int, start: int, end: int) -> NDArray[np.int64]:
    """The positions in time, height and width of the placeholders from ``start`` to ``end`` of an
    image: [3, end - start]

    >>> axes_of([ImageRun(b"", 0, 4, columns=2), ImageRun(b"", 5, 6, columns=3)], 1, 7, 10).tolist()
    [[3, 3, 3], [3, 4, 4], [5, 3, 4]]

    Args:
        runs: the images of the prompt, in order.
        index: of the image.
        start, end: places in the cache.
    """
    run = runs[index]
    first = run.start - sum(one.positions_less for one in runs[:index])
    numbers = np.arange(start, end) - run.start + run.first
    rows, columns = np.divmod(numbers, run.columns)
    return first + np.stack((np.zeros_like(rows), rows, columns))
