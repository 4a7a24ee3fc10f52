"""Which pages of a prompt does a policy watch? A fixed share of all prefixes, chosen by hash.

Whether a page is watched depends on its tokens and on everything before it, so every request that uses a page agrees on
it, and a cache that is a hundredth of the pool and sees a hundredth of the pages behaves like the pool
(Waldspurger et al., "Efficient MRC construction with SHARDS", 2015).
"""

import zlib

import numpy as np

from radixrt.messages.ids import TokenIds

_MIX = np.uint64(0xBF58476D1CE4E5B9)
_STEP = np.uint64(0x9E3779B97F4A7C15)


class PageSample:
    """Picks one page in ``one_in``, a power of two, by a 64-bit hash of the prefix that the page ends.

    Who does not know ``seed`` can't tell from the hashes what was hashed; with the same seed, the same hashes.
    """

    def __init__(self, page_size: int, one_in: int, seed: int = 0) -> None:
        self._page_size = page_size
        self._mask = np.uint64(one_in - 1)
        random = np.random.default_rng(seed)
        self._weights = random.integers(0, 2**64, page_size, dtype=np.uint64) | np.uint64(1)

    def pick(self, tokens: TokenIds, salt: str) -> list[int]:
        """The hashes of the picked full pages of a prompt, in order. Equal prefixes have equal hashes."""
        num_pages = len(tokens) // self._page_size
        pages = tokens[: num_pages * self._page_size].astype(np.uint64)
        alone = _scramble((pages.reshape(num_pages, self._page_size) * self._weights).sum(axis=1))
        places = np.arange(1, num_pages + 1, dtype=np.uint64) * _STEP | np.uint64(1)
        prefixes = np.cumsum(alone * places, dtype=np.uint64)
        hashes = _scramble(prefixes + np.uint64(zlib.crc32(salt.encode())))
        return hashes[(hashes & self._mask) == 0].tolist()


def _scramble(values: np.ndarray) -> np.ndarray:
    """Spread every bit of a 64-bit number over all of them."""
    values = (values ^ (values >> np.uint64(30))) * _MIX
    values = (values ^ (values >> np.uint64(27))) * _STEP
    return values ^ (values >> np.uint64(31))
