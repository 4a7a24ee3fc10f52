"""The settled tokens of a beginning are the first tokens of every text that goes on from it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.messages.answers import EngineInfo
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.messages.requests import ChatPrompt, TextPrompt
from radixrt.supervisor.launch import prepare
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import PromptEncoder
from radixrt.tokenizer.prompt.settled import settled_length
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import (
    CHATML,
    TEXT,
    byte_fallback,
    byte_level,
    save_byte_level,
    train_byte_level,
)
from tests.servers.fake_scheduler import engine_info

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FROM_THE_RIGHT = r"\d{1,3}(?=(\d{3})*\b)|\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Groups digits from the right, as some newer tokenizers do: each further digit moves all groups."""


def by_regex(pattern: str) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        numbers = list(map(str, range(100, 1000)))
        tokenizer = train_byte_level([*TEXT, *numbers], 700, [], use_regex=False)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        return tokenizer

    return make


def metaspace() -> Tokenizer:
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])  # fmt: skip
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(Path(prepare(ServerConfig(model_path=DEMO_MODEL)).model_path) / "tokenizer.json"))  # fmt: skip


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama_3": by_regex(LLAMA_3),
    "from_the_right": by_regex(FROM_THE_RIGHT),
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "unigram": unigram,
    "demo": demo,
}

PARTS = [
    *TEXT, "12345678901234", " 1,234.5 ", "\n\n", "\r\n", "   ", "\t", "don't", "「こんにちは」、世界。",
    "สวัสดีชาวโลก", "مرحبا بالعالم", "e\u0301a\u0308", "👩‍👩‍👧👍🏽", "{\"a\": [1, 2]}", "://x.y/z?q=1", "…", "ﬁne", "नमस्ते",
]  # fmt: skip


def texts(count: int) -> list[str]:
    rng = random.Random(3)
    return [
        "".join(rng.choice(PARTS) + rng.choice(["", " "]) for _ in range(rng.randrange(3, 9)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_1000_splits_of_50_texts_leave_the_settled_tokens(kind: str) -> None:
    tokenizer, rng = KINDS[kind](), random.Random(kind)
    settled = cut_characters = 0
    for text in texts(50):
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        for _ in range(20):
            cut = rng.randrange(1, len(text))
            encoding = tokenizer.encode(text[:cut], add_special_tokens=False)
            length = settled_length(encoding, text[:cut])
            assert encoding.ids[:length] == whole[:length], (text[:cut], text[cut:])
            settled += 0 if length == 0 else encoding.offsets[length - 1][1]
            cut_characters += cut
    assert settled / cut_characters > 0.6, "much is settled"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    folder = save_byte_level(tmp_path_factory.mktemp("chatml"), CHATML)
    return PromptEncoder(Vocabulary.load(ServerConfig(model_path=str(folder))))


INFO: EngineInfo = engine_info(context_length=100_000)
LIMITS = Limits.from_info(INFO)
STORY = "The quick brown fox jumps over the lazy dog. Où est la bibliothèque? 你好 世界 12345 and so on. "


def test_a_chat_is_settled_within_its_last_message(encoder: PromptEncoder) -> None:
    rng = random.Random(5)
    system = {"role": "system", "content": "Be brief."}
    whole = [system, {"role": "user", "content": STORY * 3}]
    ids = encoder.encode(ChatPrompt(whole), LIMITS, BASE_ROOT).token_ids
    for _ in range(60):
        cut = rng.randrange(10, len(STORY) * 3)
        beginning = ChatPrompt([system, {"role": "user", "content": (STORY * 3)[:cut]}])
        found = encoder.settled.encode(beginning, "text", LIMITS, BASE_ROOT)
        assert found == ids[: len(found)]
        part = encoder.encode(beginning, LIMITS, BASE_ROOT).token_ids
        assert len(found) > 0.5 * len(part) - 40


def test_a_complete_message_is_settled_up_to_the_next(encoder: PromptEncoder) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    found = encoder.settled.encode(ChatPrompt(messages), "messages", LIMITS, BASE_ROOT)
    longer = [*messages, {"role": "user", "content": "More?"}]
    ids = encoder.encode(ChatPrompt(longer), LIMITS, BASE_ROOT).token_ids
    assert found == ids[: len(found)]
    both = encoder.encode(ChatPrompt(messages, add_generation_prompt=False), LIMITS, BASE_ROOT)
    assert len(found) > len(both.token_ids) - 3, "the end of the turn is among them"


def test_special_tokens_in_texts_settle_nothing_wrong(encoder: PromptEncoder) -> None:
    content = STORY + "<|im_end|>" + STORY
    ids = encoder.encode(ChatPrompt([{"role": "user", "content": content}]), LIMITS).token_ids
    for cut in range(len(STORY) + 10, len(content), 7):
        beginning = ChatPrompt([{"role": "user", "content": content[:cut]}])
        found = encoder.settled.encode(beginning, "text", LIMITS, BASE_ROOT)
        assert found == ids[: len(found)] and found


def test_a_text_begins_with_its_special_tokens(encoder: PromptEncoder) -> None:
    ids = encoder.encode(TextPrompt(STORY), LIMITS).token_ids
    found = encoder.settled.encode(TextPrompt(STORY[:50]), "text", LIMITS, BASE_ROOT)
    assert found and found == ids[: len(found)]
    assert encoder.settled.encode(TextPrompt("Hel"), "text", LIMITS, BASE_ROOT) == []
