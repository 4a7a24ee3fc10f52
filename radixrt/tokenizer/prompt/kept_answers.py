"""Keeps the tokens of generated answers, for when an answer comes back in a later request of its
chat.

A text has several forms in tokens, and a model does not always generate its tokenizer's. Encoded
anew, such an answer becomes other tokens: their KV is not in the cache, and the model reads tokens
that it did not generate.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from radixrt.messages.cache_root import CacheRoot
from radixrt.messages.ids import TokenIds

ENTRY_BYTES = 448
"""Memory of an entry beside that of its token ids or text: objects, key, place in the order
(measured: 290 to 440)."""

Value = TypeVar("Value")


class TokenMemory(Generic[Value]):
    """Drops the least recently used values beyond ``capacity_bytes``. Safe to use from several
    threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._kept: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> Value | None:
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def limit(self, max_bytes: int) -> None:
        """Lower the capacity, if it is higher. Call it while the memory is empty."""
        self._capacity_bytes = min(self._capacity_bytes, max_bytes)

    def keep(self, key: bytes, value: Value, num_bytes: int) -> None:
        """Store a value whose token ids or text take ``num_bytes``, in place of the key's earlier
        one. One larger than the capacity is not stored, and no other dropped for it."""
        cost = num_bytes + ENTRY_BYTES
        with self._lock:
            _, old_cost = self._kept.pop(key, (None, 0))
            self._used_bytes -= old_cost
            if cost > self._capacity_bytes:
                return
            self._kept[key] = value, cost
            self._used_bytes += cost
            while self._used_bytes > self._capacity_bytes:
                _, (_, dropped) = self._kept.popitem(last=False)
                self._used_bytes -= dropped


CAPACITY_BYTES = 16 << 20


class KeptAnswer(NamedTuple):
    start: int
    """The place in the text where it begins, in characters."""
    end: int
    ids: TokenIds


class KeptAnswers:
    """Answers by the whole text up to their end: only a continuation of the same chat finds one.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self.memory: TokenMemory[KeptAnswer] = TokenMemory(CAPACITY_BYTES)

    def keep(self, prompt: str, answer: str, ids: list[int], root: CacheRoot) -> None:
        """Keep the tokens of an answer to a prompt (as text)."""
        digest = text_digest(root, prompt)
        digest.update(_bytes(answer))
        start, end = len(prompt), len(prompt) + len(answer)
        kept = KeptAnswer(start, end, np.array(ids, dtype=np.int32))
        self.memory.keep(digest.digest(), kept, kept.ids.nbytes)

    def find(self, text: str, ends: Iterable[int], root: CacheRoot) -> list[KeptAnswer]:
        """The answers in a text, in order; none overlaps the one before it.

        Args:
            ends: where in the text answers may end, ascending.
            root: the cache root; answers are found only by requests with the same one.
        """
        if not len(self.memory):
            return []
        digest = text_digest(root)
        position = 0
        found: list[KeptAnswer] = []
        for end in ends:
            digest.update(_bytes(text[position:end]))
            position = end
            kept = self.memory.find(digest.digest())
            if kept is not None and (not found or kept.start >= found[-1].end):
                found.append(kept)
        return found


def text_digest(root: CacheRoot, text: str = "") -> "hashlib.blake2b":
    """A digest of text, to which more may be added; it differs with the root. 16 bytes."""
    key = hashlib.blake2b(root.packed(), digest_size=32).digest()
    return hashlib.blake2b(_bytes(text), key=key, digest_size=16)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
