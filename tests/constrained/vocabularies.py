"""Real tokenizers of each kind, with what grammars meet in them: added tokens, control tokens,
padded ids."""

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from radixrt.constrained.tokenizer_facts import TokenizerFacts
from tests.checkpoints.tiny_tokenizers import TEXT, byte_fallback, byte_level, train_byte_level

PADDING = 13
"""Ids at the end of the model's vocabulary that have no token."""

JSON_TEXT = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 12, "unit": null}}',
    '[true, false, 1.5e10, -3, "a\\nb", {"x": []}]\n{\n  "a": 1,\n    "b": "c"\n}',
    "positive negative neutral 2024-01-31 0.25 <tool_call>",
]


def byte_level_json() -> Tokenizer:
    """Byte-level BPE whose merges cross the borders of JSON's tokens; <tool_call> is an added,
    ordinary token."""
    special = ["<|end|>", "<|eot|>", "<|other|>"]
    tokenizer = train_byte_level(
        JSON_TEXT + TEXT, 500, special, use_regex=False, max_token_length=8
    )
    tokenizer.add_tokens(
        [AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)]
    )
    return tokenizer


def control_tool_call() -> Tokenizer:
    """As above, but <tool_call> and </tool_call> are control tokens."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def unigram() -> Tokenizer:
    """Like T5's and XLM-R's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=160,
        show_progress=False,
        unk_token="<unk>",
        special_tokens=["<unk>", "</s>"],
    )
    tokenizer.train_from_iterator(TEXT + JSON_TEXT, trainer)
    return tokenizer


KINDS = {
    "byte_level": (byte_level, ("<|im_end|>",)),
    "byte_level_json": (byte_level_json, ("<|end|>", "<|eot|>")),
    "byte_fallback": (byte_fallback, ("</s>",)),
    "control_tool_call": (control_tool_call, ("<|im_end|>", "<|im_start|>")),
}


@functools.cache
def facts_of(kind: str) -> TokenizerFacts:
    make, ends = KINDS[kind]
    tokenizer = make()
    return TokenizerFacts.from_tokenizer(
        tokenizer,
        vocab_size=tokenizer.get_vocab_size() + PADDING,
        eos_token_ids=tuple(tokenizer.token_to_id(end) for end in ends),
    )
