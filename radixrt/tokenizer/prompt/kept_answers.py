"""Keeps the tokens of generated answers, for when an answer comes back in a later request of its
chat.

A text has several forms in tokens, and a model does not always generate its tokenizer's. Encoded
anew, such an answer becomes other tokens: their KV is not in the cache, and the model reads tokens
that it did not generate.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from radixrt.messages.ids import TokenIds
from radixrt.tokenizer.prompt.token_memory import TokenMemory

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

    def keep(self, prompt: str, answer: str, ids: list[int], salt: str) -> None:
        """Keep the tokens of an answer to a prompt (as text)."""
        digest = text_digest(salt, prompt)
        digest.update(_bytes(answer))
        start, end = len(prompt), len(prompt) + len(answer)
        kept = KeptAnswer(start, end, np.array(ids, dtype=np.int32))
        self.memory.keep(digest.digest(), kept, kept.ids.nbytes)

    def find(self, text: str, ends: Iterable[int], salt: str) -> list[KeptAnswer]:
        """The answers in a text, in order; none overlaps the one before it.

        Args:
            ends: where in the text answers may end, ascending.
            salt: the cache salt; answers are found only by requests with the same one.
        """
        if not len(self.memory):
            return []
        digest = text_digest(salt)
        position = 0
        found: list[KeptAnswer] = []
        for end in ends:
            digest.update(_bytes(text[position:end]))
            position = end
            kept = self.memory.find(digest.digest())
            if kept is not None and (not found or kept.start >= found[-1].end):
                found.append(kept)
        return found


def text_digest(salt: str, text: str = "") -> "hashlib.blake2b":
    """A digest of text, to which more may be added; it differs with the salt. 16 bytes."""
    key = hashlib.blake2b(_bytes(salt), digest_size=32).digest()
    return hashlib.blake2b(_bytes(text), key=key, digest_size=16)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
