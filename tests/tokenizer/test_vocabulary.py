"""The bytes behind each token, added up, are the text's own bytes."""

import ctypes
import itertools
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from radixrt.base.config import ServerConfig
from radixrt.base.token_bytes import SavedTokens
from radixrt.messages.answers import LogprobColumns
from radixrt.tokenizer.vocabulary import KEPT_WORDS, Vocabulary
from tests.checkpoints.tiny_tokenizers import byte_fallback, byte_level, save_byte_level

VOCABULARIES = {
    "byte_level": Vocabulary(PreTrainedTokenizerFast(tokenizer_object=byte_level())),
    "byte_fallback": Vocabulary(PreTrainedTokenizerFast(tokenizer_object=byte_fallback())),
}


@pytest.mark.parametrize("kind", VOCABULARIES)
@given(text=st.text(max_size=30))
def test_token_bytes_add_up_to_the_text(kind: str, text: str) -> None:
    vocabulary = VOCABULARIES[kind]
    ids = vocabulary.encode(text, add_special_tokens=False)
    joined = b"".join(map(vocabulary.token_bytes, ids))
    leading = b" " if kind == "byte_fallback" and text else b""
    assert joined == leading + text.encode()


def test_part_of_a_character_has_its_own_bytes_and_a_replacement_character_as_text() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    first = vocabulary.encode("\U0001f98a", add_special_tokens=False)[0]
    columns = LogprobColumns()
    columns.add([first], [-1.0])
    (logprob,) = columns.take(vocabulary.token_bytes)
    assert logprob.token == "\ufffd" and "\U0001f98a".encode().startswith(logprob.token_bytes)


def test_a_bad_word_is_forbidden_at_the_beginning_of_a_text_and_behind_a_space() -> None:
    vocabulary = VOCABULARIES["byte_level"]
    bare, spaced = (tuple(vocabulary.encode(text, False)) for text in ("fox jumps", " fox jumps"))
    assert bare != spaced and len(bare) > 1
    assert vocabulary.encode_bad_words(["  fox jumps", "fox jumps"]) == (bare, spaced)
    digit, spaced_digit = (tuple(vocabulary.encode(text, False)) for text in ("7", " 7"))
    assert spaced_digit[-1:] == digit, "the longer sequence would forbid nothing more"
    assert vocabulary.encode_bad_words(["7"]) == (digit,)


def test_an_id_without_a_token_is_empty() -> None:
    assert VOCABULARIES["byte_level"].token_bytes(100_000) == b""


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_a_tokenizer_of_no_particular_class_is_loaded_without_auto_tokenizer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AutoTokenizer imports torch, which takes two seconds; transformers 4 and 5 name the class
    differently."""
    settings = save_byte_level(tmp_path) / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", name))
    assert f'"{name}"' in settings.read_text()
    monkeypatch.setattr(transformers, "AutoTokenizer", None)
    vocabulary = Vocabulary.load(ServerConfig(model_path=str(tmp_path)))
    ids = vocabulary.encode("Hello world", add_special_tokens=False)
    assert ids == VOCABULARIES["byte_level"].encode("Hello world", add_special_tokens=False)


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def test_the_words_that_the_library_keeps_are_bounded() -> None:
    """Their memory is that of the C library: Python traces none of it."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("not glibc")
    mallinfo2.restype = _MallocInfo
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=byte_level()))
    numbers = itertools.count(10**9)

    def growth() -> int:
        """Bytes for KEPT_WORDS words that were not there before, and one tenth more."""
        before = mallinfo2().uordblks
        for _ in range(KEPT_WORDS * 11 // 10):
            vocabulary.encode(str(next(numbers)), add_special_tokens=False)
        return int(mallinfo2().uordblks) - before

    first = growth()
    assert first > 100 * KEPT_WORDS and growth() < first / 5


def test_tokens_are_saved_by_id_also_where_ids_are_left_out(tmp_path: Path) -> None:
    tokenizer = Tokenizer(BPE(vocab={"a": 0, "bc": 5}, merges=[]))
    vocabulary = Vocabulary(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    vocabulary.learn_token_bytes()
    vocabulary.save(tmp_path / "tokenizer.json")
    saved = SavedTokens.load(tmp_path / "tokenizer.json")
    assert saved is not None and list(saved.table) == [b"a", b"", b"", b"", b"", b"bc"]
