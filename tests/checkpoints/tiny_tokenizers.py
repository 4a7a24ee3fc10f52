"""Real tokenizers of each kind, trained in a moment on a few sentences."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello world, how are you today?",
    "def main(): return [x for x in range(10)]  # a comment",
    "Où est la bibliothèque? 你好 世界 Привет мир 👩‍👩‍👧 naïve café",
    "the the the and and of of to to in in is is was was for for it it with with",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_byte_level(
    texts: Sequence[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    *,
    use_regex: bool = True,
    max_token_length: int | None = None,
) -> Tokenizer:
    """Byte-level BPE; the special tokens have the first ids.

    Args:
        use_regex: whether texts are split into words before; else merges may cross their borders.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
        max_token_length=max_token_length,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    """Like Llama 3's and Qwen's; ids 0 and 1 are <|im_start|> and <|im_end|>."""
    tokenizer = train_byte_level(TEXT, 400, ["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2's and Mistral's: ▁ for spaces, <0xNN> for what is not in the vocabulary, <s>
    first."""
    letters = trainers.BpeTrainer(vocab_size=120, show_progress=False, max_token_length=4)
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator([t.encode("ascii", "ignore").decode() for t in TEXT], letters)
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [
        (left, token[len(left) :])
        for token in pieces
        for left in (token[:i] for i in range(1, len(token)))
        if left in pieces and token[len(left) :] in pieces
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def save_byte_level(
    folder: Path,
    chat_template: str | None = CHATML,
    special_tokens: Sequence[str] = (),
    tokens: Sequence[str] = (),
) -> Path:
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=chat_template
    )
    hf.save_pretrained(folder)
    return folder


def save_byte_fallback(folder: Path, chat_template: str | None = None) -> Path:
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(
        tokenizer_object=byte_fallback(),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=chat_template,
    )
    hf.save_pretrained(folder)
    return folder
