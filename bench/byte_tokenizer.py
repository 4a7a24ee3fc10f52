"""Makes byte-level tokenizers to measure with: of the 256 bytes alone, of syllables, or trained."""

import json
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import islice, product
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS_CHARACTERS = 40_000_000
END = "<|endoftext|>"

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The characters by which byte-level tokenizers write the 256 bytes."""

SPACE = "\u0120"
"""How byte-level tokenizers write a space."""

_SYLLABLES = [onset + vowel for onset in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
_PUNCTUATION = [
    *['":', '",', '{"', '"}', '["', '"]', "},", "],", "[{", "}]", "00", "10", "20"],
    SPACE * 2,
]


def byte_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> Tokenizer:
    """A tokenizer of the 256 bytes, the tokens that ``merges`` make of them, and END as the last
    token.

    Args:
        merges: pairs of tokens, each made before; no two pairs make the same token.
    """
    tokens = [*BYTES, *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.add_special_tokens([END])
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocab_size`` tokens, END the last, trained on what every
    Python installation has: the source of its own library. The same on every run.

    Raises:
        ValueError: the library's text gives fewer tokens.
    """
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_library_source(), trainer)
    tokenizer.add_special_tokens([END])
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(
            f"There is text for {tokenizer.get_vocab_size()} tokens only, not for {vocab_size}."
        )
    return tokenizer


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """``vocab_size`` tokens: 256 bytes, pieces of JSON, words of up to four syllables, and END as
    the last.

    What a grammar costs depends on the vocabulary: its size, how long its tokens are and which of
    them hold quotes and braces. A trained tokenizer of 128k tokens takes a minute; this one takes a
    second.
    """
    return byte_tokenizer(list(islice(_merges(), vocab_size - 1 - len(BYTES))))


def extended_tokenizer(trained: Tokenizer, vocab_size: int) -> Tokenizer:
    """A trained byte-level tokenizer with words of syllables as further tokens, for the vocabulary
    of a large model without its training."""
    merges: list[tuple[str, str]] = [tuple(m) for m in json.loads(trained.to_str())["model"]["merges"]]  # fmt: skip
    tokens = {*BYTES, *map("".join, merges)}
    for pair in _merges():
        if len(tokens) == vocab_size - 1:
            break
        if (token := "".join(pair)) not in tokens and tokens.issuperset(pair):
            tokens.add(token)
            merges.append(pair)
    return byte_tokenizer(merges)


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


def _library_source() -> Iterator[str]:
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"]), Path(paths["purelib"])]
    total = 0
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            yield text
            total += len(text)
            if total >= CORPUS_CHARACTERS:
                return
