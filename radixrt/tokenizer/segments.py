"""How is a long conversation encoded without encoding again what did not change?

A special token splits the text: what stands between two of them is encoded by itself, whatever is around it. So
the ids of such a segment (a message, usually) are kept, and the next turn of a conversation encodes only its new
messages. A tokenizer takes about a second for a megabyte of text, far longer than a cached prefix takes in the model.
"""

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, compress, pairwise
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Tokenizer

from radixrt.messages.ids import TokenIds

SHORTEST_KEPT = 256
"""Characters; shorter segments are encoded about as quickly as they are found."""

CAPACITY = 1 << 24
"""Token ids kept, of four bytes each; ..."""
ENTRY_COST = 80
"""... what else a segment takes in memory counts as so many."""

_PROBES = ("Hello world", " two  spaces ", "\n\nline\n", "ä€😀", "1234 {}", "▁x", "")


class Segment(NamedTuple):
    """A piece of a text: a special token and what comes after it, up to the next one."""

    start: int
    """Where it begins, in characters."""
    text: str
    ids: TokenIds


class SegmentEncoder:
    """Encodes texts in which special tokens count as such, and adds none of its own. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: Sequence[AddedToken]) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[bytes, TokenIds] = OrderedDict()
        self._num_kept = 0
        """Of the capacity, what is used."""
        self._lock = threading.Lock()
        self._begin = _beginnings(tokenizer, special_tokens)

    def encode(self, text: str, salt: str = "") -> list[Segment]:
        """The segments of a text, in order; the first one may begin without a special token.

        Args:
            salt: segments are shared only among texts with the same salt, so that how long this takes tells
                nobody what others have said.
        """
        found = () if self._begin is None else self._begin.finditer(text)
        starts = {match.start() for match in found}
        bounds = sorted({0, len(text)} | starts)
        pieces = [text[start:end] for start, end in pairwise(bounds)]
        keys = [_key(piece, salt) if len(piece) >= SHORTEST_KEPT else None for piece in pieces]
        if keys and bounds[0] not in starts:
            keys[0] = None  # tokenizers may treat the beginning of a text in their own way
        known = [None if key is None else self._find(key) for key in keys]
        unknown = [piece for piece, ids in zip(pieces, known, strict=True) if ids is None]
        new = iter(self._encode_each(unknown))
        segments = []
        for start, piece, key, ids_known in zip(bounds, pieces, keys, known, strict=False):
            ids = next(new) if ids_known is None else ids_known
            if ids_known is None and key is not None:
                self._keep(key, ids)
            segments.append(Segment(start, piece, ids))
        return segments

    def _encode_each(self, pieces: list[str]) -> list[TokenIds]:
        encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def _find(self, key: bytes) -> TokenIds | None:
        with self._lock:
            ids = self._kept.get(key)
            if ids is not None:
                self._kept.move_to_end(key)
            return ids

    def _keep(self, key: bytes, ids: TokenIds) -> None:
        with self._lock:
            if key in self._kept:
                return  # it occurs twice in this text, or another thread was quicker
            self._kept[key] = ids
            self._num_kept += len(ids) + ENTRY_COST
            while self._num_kept > CAPACITY:
                _, dropped = self._kept.popitem(last=False)
                self._num_kept -= len(dropped) + ENTRY_COST


def joined(segments: Sequence[Segment]) -> list[int]:
    """The token ids of a whole text."""
    return list(chain.from_iterable(segment.ids.tolist() for segment in segments))


def _key(piece: str, salt: str) -> bytes:
    key = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), key=key, digest_size=16).digest()


def _beginnings(
    tokenizer: Tokenizer, special_tokens: Sequence[AddedToken]
) -> re.Pattern[str] | None:
    """Where segments begin: at special tokens that split a text cleanly; None if there are none.

    One that swallows the spaces beside it, or is looked for in the normalized text, does not. Nor is any trusted
    unseen: encoding by segments has to give what encoding at once gives.
    """
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    clean = [
        token.content
        for token in special_tokens
        if not (token.lstrip or token.rstrip or token.normalized or token.single_word)
        and not any(_hides(other, token.content) for other in added)
    ]
    kept = list(compress(clean, _each_splits(tokenizer, clean)))
    if not kept:
        return None
    return re.compile("|".join(map(re.escape, sorted(kept, key=len, reverse=True))))


def _hides(other: str, special: str) -> bool:
    """Whether ``special`` can begin inside an occurrence of ``other``, where nobody would look for it."""
    if special[0] not in other[1:]:
        return False
    rests = [other[start:] for start in range(1, len(other))]
    return any(rest.startswith(special) or special.startswith(rest) for rest in rests)


def _each_splits(tokenizer: Tokenizer, specials: list[str]) -> list[bool]:
    """For each special token, whether what comes before it is encoded as if the text ended there."""
    pairs = list(zip(_PROBES, _PROBES[1:] + _PROBES[:1], strict=True))
    texts = [
        text
        for special in specials
        for before, after in pairs
        for text in (before + special + after, before, special + after)
    ]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    verdicts = []
    for _ in specials:
        cases = [(next(encodings).ids, next(encodings).ids, next(encodings).ids) for _ in pairs]
        verdicts.append(all(whole == head + tail for whole, head, tail in cases))
    return verdicts
