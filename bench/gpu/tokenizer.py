"""A tokenizer of any size made from nothing: byte-level BPE over syllables and the punctuation of JSON.

What a grammar costs depends on the vocabulary: its size, how long its tokens are and which of them hold
quotes and braces. A trained tokenizer of 128k tokens takes a minute and a corpus; this one takes a second.
"""

from collections.abc import Iterator
from itertools import islice, product

from tokenizers import Tokenizer

from bench.byte_tokenizer import BYTES, byte_tokenizer

SPACE = "\u0120"
"""How byte-level tokenizers write a space."""

_SYLLABLES = [onset + vowel for onset in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
_PUNCTUATION = [
    '":',
    '",',
    '{"',
    '"}',
    '["',
    '"]',
    "},",
    "],",
    "[{",
    "}]",
    "00",
    "10",
    "20",
    SPACE * 2,
]


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """``vocab_size`` tokens: 256 bytes, pieces of JSON, words of up to four syllables, and END as the last."""
    return byte_tokenizer(list(islice(_merges(), vocab_size - 1 - len(BYTES))))


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs of tokens that make a new one, no token twice, each part made before."""
    yield from ((text[0], text[1:]) for text in _PUNCTUATION)
    yield from ((syllable[0], syllable[1]) for syllable in _SYLLABLES)
    yield from ((SPACE, syllable) for syllable in _SYLLABLES)
    two = [first + second for first, second in product(_SYLLABLES, repeat=2)]
    yield from product(_SYLLABLES, repeat=2)
    yield from ((SPACE, word) for word in two)
    yield from ((word, syllable) for syllable in _SYLLABLES for word in two)
    yield from product(two, repeat=2)
