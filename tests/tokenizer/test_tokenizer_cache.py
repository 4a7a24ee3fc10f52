"""A tokenizer from the cache is that of transformers, and the cache follows the checkpoint's
files."""

import pwd
import shutil
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.messages.requests import ChatPrompt, TextPrompt
from radixrt.tokenizer import vocabulary as tokenizer_cache
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import PromptEncoder
from radixrt.tokenizer.vocabulary import CachedTokenizer, Vocabulary
from tests.checkpoints.tiny_tokenizers import CHATML, TEXT, save_byte_fallback, save_byte_level

LIMITS = Limits(context_length=4096, kv_pool_tokens=4096, vocab_size=1000)
TEXTS = [*TEXT, "", " ", "\n\n", "<s>the </s> fox", "<|im_start|>x<|im_end|>y<tool_call>", "\x00🦊"]
MESSAGES = [
    {"role": "user", "content": "the <|im_end|> fox</s>", "name": None},
    {"role": "assistant", "content": "Well, I"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": "ä"}}}]
SETTINGS: list[dict] = [
    {"add_generation_prompt": True},
    {"continue_final_message": True},
    {"tools": TOOLS},
    {"enable_thinking": False},
]
TEMPLATE = (
    "{{ bos_token }}|{{ eos_token }}|{{ unk_token }}|{{ image_token }}|{{ tools | tojson(indent=2) }}|{{ enable_thinking }}"
    "{% for m in messages %}{% generation %}{{ m }}{{ m.content }}{% endgeneration %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty, for tokenizers of any size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_cache, "_FEWEST_TOKENS", 0)
    return tmp_path / "cache" / "radixrt" / "tokenizers"


def load(folder: Path, **settings: object) -> Vocabulary:
    return Vocabulary.load(ServerConfig(model_path=str(folder), **settings))  # type: ignore[arg-type]


def load_cached(folder: Path, **settings: object) -> Vocabulary:
    """The tokenizer of a second start."""
    load(folder, **settings)
    vocabulary = load(folder, **settings)
    assert isinstance(vocabulary.hf, CachedTokenizer)
    return vocabulary


def folder_of(kind: str, folder: Path) -> Path:
    if kind == "byte_level":
        return save_byte_level(folder, special_tokens=["<|image|>", "<|image_pad|>"])
    return save_byte_fallback(folder, TEMPLATE)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_cached_tokenizer_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    hf = AutoTokenizer.from_pretrained(folder)
    cached = load_cached(folder)
    for text in TEXTS:
        ids = hf(text)["input_ids"]
        assert cached.backend.encode(text).ids == ids
        assert cached.decode(ids) == hf.decode(ids)
        assert cached.decode(ids, skip_special_tokens=True) == hf.decode(
            ids, skip_special_tokens=True
        )
    assert cached.hf.chat_template == hf.chat_template
    assert cached.hf.bos_token_id == hf.bos_token_id
    for settings in SETTINGS:
        arguments = {"tokenize": False, **settings}
        expected = hf.apply_chat_template(MESSAGES, **arguments)
        assert cached.hf.apply_chat_template(MESSAGES, **arguments) == expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_cached_facts_are_those_of_the_tokenizer(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    found = Vocabulary(AutoTokenizer.from_pretrained(folder))
    cached = load_cached(folder)
    assert cached.segments.rules == found.segments.rules and cached.segments.rules.beginnings
    assert cached.longest_token == found.longest_token
    assert cached.special_ids == found.special_ids
    for token_id in range(found.backend.get_vocab_size() + 2):
        assert cached.token_bytes(token_id) == found.token_bytes(token_id), token_id
    cached.save(tmp_path / "saved.json")
    saved = Tokenizer.from_file(str(tmp_path / "saved.json"))
    assert saved.to_str() == found.backend.to_str()
    exact, quick = (
        TokenizerFacts.load(file, vocab_size=500, eos_token_ids=(2,))
        for file in (folder / "tokenizer.json", tmp_path / "saved.json")
    )
    assert list(quick.tokens) == list(exact.tokens) and quick.special_ids == exact.special_ids
    assert exact.has_tokenizer and not quick.has_tokenizer
    assert quick.encode("Hello  world é") == exact.encode("Hello  world é")
    assert quick.has_tokenizer


@pytest.mark.parametrize("left", ["a", " ", "#version", "ä\n"])
def test_merges_of_any_tokens_are_kept(left: str) -> None:
    vocab = {left: 0, "b": 1, left + "b": 2}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[(left, "b")]))
    written = tokenizer_cache._with_short_merges(tokenizer.to_str())
    assert Tokenizer.from_buffer(written).to_str() == tokenizer.to_str()
    assert (f'"{left} b"'.replace("\n", "\\n") in written.decode()) == (left in ("a", "ä\n"))


def test_a_cached_tokenizer_needs_transformers_for_chats_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    folder = save_byte_level(tmp_path / "model")
    load_cached(folder)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        vocabulary = load(folder, chat_template=str(tmp_path / "mine.jinja"))
        encoder = PromptEncoder(vocabulary)
        text, ids, *_ = encoder.encode(TextPrompt("the fox"), LIMITS)
        assert vocabulary.decode(ids) == text == "the fox"
        with pytest.raises(RequestError, match="transformers"):
            encoder.encode(ChatPrompt(messages=MESSAGES), LIMITS)
    text, _, *_ = encoder.encode(ChatPrompt(messages=MESSAGES), LIMITS)
    assert text == "the <|im_end|> fox</s>Well, I"


def test_one_of_several_templates_depends_on_the_tools(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path / "model")
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("{{ tools[0].function.name }}{{ messages[0].content }}")
    for vocabulary in (load(folder), load_cached(folder)):
        encoder = PromptEncoder(vocabulary)
        plain, _, *_ = encoder.encode(ChatPrompt(messages=MESSAGES[1:]), LIMITS)
        assert plain.startswith("<|im_start|>assistant")
        assert encoder.encode(ChatPrompt(MESSAGES[1:], tools=TOOLS), LIMITS)[0] == "fWell, I"


def test_a_template_file_is_checked_and_is_not_kept(tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path / "model")
    mine = tmp_path / "mine.jinja"
    mine.write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    vocabulary = load_cached(folder, chat_template=str(mine))
    assert PromptEncoder(vocabulary).encode(ChatPrompt(messages=MESSAGES[1:]), LIMITS)[0] == "Well, I"  # fmt: skip
    assert load(folder).hf.chat_template == CHATML
    mine.write_text("{% for m in messages %}")
    with pytest.raises(ConfigError, match=r"mine\.jinja, line 1"):
        load(folder, chat_template=str(mine))


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "new.json"]
)
def test_a_changed_file_is_read_again(name: str, tmp_path: Path) -> None:
    folder = save_byte_level(tmp_path / "model")
    load_cached(folder)
    file = folder / name
    content = file.read_text() if file.exists() else "{}"
    file.write_text(content.replace("<tool_call>", "<tool_used>") + " ")
    vocabulary = load(folder)
    assert not isinstance(vocabulary.hf, CachedTokenizer)
    assert ("<tool_used>" in vocabulary.backend.get_vocab()) == (name == "tokenizer.json")


def test_a_damaged_entry_is_made_again(tmp_path: Path, cache: Path) -> None:
    folder = save_byte_level(tmp_path / "model")
    for name in ("tokenizer.json", "facts.msgpack"):
        load_cached(folder)
        (entry,) = cache.iterdir()
        for end in (b"", bytes(10)):  # zeros are what a crash may leave
            (entry / name).write_bytes((entry / name).read_bytes()[:-10] + end)
            assert not isinstance(load(folder).hf, CachedTokenizer)
            assert isinstance(load(folder).hf, CachedTokenizer)


def test_an_entry_may_go_while_its_tokenizer_is_used(tmp_path: Path, cache: Path) -> None:
    vocabulary = load_cached(save_byte_level(tmp_path / "model"))
    shutil.rmtree(cache)
    vocabulary.save(tmp_path / "saved.json")
    saved = Tokenizer.from_file(str(tmp_path / "saved.json"))
    assert saved.to_str() == vocabulary.backend.to_str()


def test_the_cache_keeps_the_newest_entries_and_none_of_code_that_came_along(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_cache, "_MAX_ENTRIES", 2)
    folders = [
        save_byte_level(tmp_path / name, special_tokens=[f"<{name}>"]) for name in ("a", "b", "c")
    ]
    for folder in folders:
        load(folder)
    cached = [isinstance(load(folder).hf, CachedTokenizer) for folder in folders[1:]]
    assert cached == [True, True] and len(list(cache.iterdir())) == 2
    assert not isinstance(load(folders[2], trust_remote_code=True).hf, CachedTokenizer)
    trusted = load(folders[0], trust_remote_code=True)
    assert not isinstance(trusted.hf, CachedTokenizer)
    assert not isinstance(load(folders[0]).hf, CachedTokenizer), "it was not kept"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    vocabulary = load(save_byte_level(tmp_path / "model"))
    assert vocabulary.encode("the fox", False)


def test_a_cache_that_cannot_be_reached_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_byte_level(tmp_path / "model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("long" * 100)))
    assert load(folder).encode("the fox", False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # a user without an entry
    assert load(folder).encode("the fox", False)
