"""Trains the tokenizer: a byte-level BPE for copying names.

A name must split into the same tokens at every position (after a space, inside quotes, at the start
of a line), so that the model can copy it token by token. Therefore a space is a separate token,
except before the most frequent words of the generated texts; each digit is a token; a newline is
never merged.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from world import LEVELS, render, sample

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TASKS = ("qa", "qa", "second_turn", "json", "label", "tool", "talk")
SPACED_WORDS = """
the of is has and a for what about its it in to with as does have one or from this that which are
you me text question other document fields field labels label fits tool call give tell choose write
extract please can find get read check book order send open use user questions answer facts
""".split()  # noqa: SIM905

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def corpus(seed: int, size: int):
    rng = random.Random(seed)
    for i in range(size):
        s = sample(rng, TASKS[i % len(TASKS)], rng.randrange(min(5, len(LEVELS))))
        yield "".join(text for text, _ in render(s.messages, s.tools))


def build(seed: int, size: int, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    spaced = "|".join(sorted(SPACED_WORDS))
    pattern = (
        rf" (?:{spaced})(?![\p{{L}}\p{{N}}_])|'s(?![\p{{L}}\p{{N}}])|\p{{N}}|\p{{L}}+"
        r"| ?[^\s\p{L}\p{N}]+|\n|[^\S\n]+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, size), trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--corpus", type=int, default=30000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    args.out.mkdir(parents=True, exist_ok=True)
    build(args.seed, args.corpus, args.vocab_size).save(str(args.out / "tokenizer.json"))
    # Written by hand, because transformers 5 writes a class name that transformers 4 does not know.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 8192,
        "clean_up_tokenization_spaces": False,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(CHAT_TEMPLATE, args.out / "chat_template.jinja")


if __name__ == "__main__":
    main()
