"""A tokenizer of realistic size, trained on what every Python installation has: the source of its own library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS_CHARACTERS = 40_000_000
END = "<|endoftext|>"


def train_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of ``vocab_size`` tokens, ``<|endoftext|>`` the last; the same on every run.

    Raises:
        ValueError: the library's text gives fewer tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_library_source(), trainer)
    tokenizer.add_special_tokens([END])
    if tokenizer.get_vocab_size() < vocab_size:
        raise ValueError(
            f"There is text for {tokenizer.get_vocab_size()} tokens only, not for {vocab_size}."
        )
    return tokenizer


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
