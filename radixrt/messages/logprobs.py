"""Log-probabilities of many tokens, in columns: a prompt of 8,000 tokens with 20 alternatives each
has 168,000 of them."""

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixrt.messages.ids import PackedIds, pack_ids, unpack_ids


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token and of the likeliest alternatives at its position (natural
    logarithm)."""

    token_id: int
    token: str
    """Text of this token alone; a token that is part of a character shows U+FFFD."""
    token_bytes: bytes
    """The token's own bytes."""
    logprob: float | None
    """None for the first token of a prompt, which nothing predicts."""
    top: list["TokenLogprob"] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at successive positions: at each, of the chosen token first, then of the
    likeliest.

    >>> columns = LogprobColumns()
    >>> columns.add([7, 8], [-0.5, -1.0])
    >>> found = columns.take(lambda token_id: b"abc"[token_id - 6 : token_id - 5])
    >>> [(one.token, one.logprob, [other.token for other in one.top]) for one in found]
    [('b', -0.5, ['c'])]
    """

    counts: PackedIds = b""
    """Number of tokens at each position."""
    token_ids: PackedIds = b""
    logprobs: bytes = b""
    """Log-probabilities as 64-bit floats; NaN where nothing predicts the token."""
    texts: dict[int, bytes] = {}
    """The bytes of each token."""

    def __len__(self) -> int:
        return len(unpack_ids(self.counts))

    def __iter__(self) -> Iterator[TokenLogprob]:
        for rows in self.in_slices(256):
            yield from rows

    def in_slices(self, size: int) -> Iterator[list[TokenLogprob]]:
        """Lists of at most ``size`` positions."""
        ends = np.cumsum(unpack_ids(self.counts)).tolist()
        ids, values = unpack_ids(self.token_ids), self._values()
        start = 0
        for first in range(0, len(ends), size):
            some = ends[first : first + size]
            found = self._tokens(ids[start : some[-1]].tolist(), values[start : some[-1]].tolist())
            bounds = [0, *(end - start for end in some)]
            yield [
                msgspec.structs.replace(found[begin], top=found[begin + 1 : end])
                for begin, end in itertools.pairwise(bounds)
            ]
            start = some[-1]

    def chosen(self) -> list[float]:
        """The log-probabilities of the chosen tokens alone, those that are known."""
        counts = unpack_ids(self.counts)
        values = self._values()[np.cumsum(counts) - counts]
        return values[~np.isnan(values)].tolist()

    def _values(self) -> NDArray[np.float64]:
        return np.frombuffer(self.logprobs, dtype="<f8")

    def _tokens(self, ids: list[int], values: list[float]) -> list[TokenLogprob]:
        return [
            TokenLogprob(
                token_id,
                self.texts[token_id].decode("utf-8", "replace"),
                self.texts[token_id],
                None if math.isnan(value) else value,
            )
            for token_id, value in zip(ids, values, strict=True)
        ]


class LogprobColumns:
    """Collects log-probabilities, position by position."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._counts = array("i")
        self._token_ids: list[PackedIds] = []
        self._logprobs = array("d")

    def add(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        """One position."""
        self.add_packed(pack_ids(list(token_ids)), logprobs)

    def add_packed(self, token_ids: PackedIds, logprobs: Iterable[float]) -> None:
        """The same as :meth:`add`, with packed ids."""
        self._counts.append(len(token_ids) // 4)
        self._token_ids.append(token_ids)
        self._logprobs.extend(logprobs)

    def take(self, bytes_of: Callable[[int], bytes]) -> TokenLogprobs:
        """The positions added so far; those that are added later begin anew.

        Args:
            bytes_of: the bytes of a token.
        """
        token_ids = b"".join(self._token_ids)
        different = np.unique(unpack_ids(token_ids)).tolist()
        taken = TokenLogprobs(
            pack_ids(self._counts),
            token_ids,
            np.asarray(self._logprobs, dtype="<f8").tobytes(),
            dict(zip(different, map(bytes_of, different), strict=True)),
        )
        self._begin()
        return taken
