"""The bytes behind each token, held against what the tokenizer itself decodes."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.base.errors import ConfigError
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from tests.checkpoints.tiny_tokenizers import byte_fallback, byte_level
from tests.constrained.vocabularies import KINDS, PADDING, facts_of, unigram

SENTENCES = [
    "Hello world",
    " two  spaces ",
    '{"a": [1, 2]}\n',
    "Où 你好 👩‍👧",
    "x",
    "",
    "\t<0x41>",
]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("text", SENTENCES)
def test_encoded_text_decodes_to_itself(kind: str, text: str) -> None:
    facts = facts_of(kind)
    ids = facts.encode(text)
    assert b"".join(facts.tokens[i] for i in ids) == text.encode()
    after = facts.tokenizer.encode("a", add_special_tokens=False).ids
    assert facts.tokenizer.decode(after + ids, skip_special_tokens=False) == "a" + text


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_bytes_are_what_the_tokenizer_decodes(kind: str, data: st.DataObject) -> None:
    facts = facts_of(kind)
    usable = [i for i in range(facts.vocab_size - PADDING) if i not in facts.special_ids]
    ids = data.draw(st.lists(st.sampled_from(usable), max_size=12))
    joined = b"".join(facts.tokens[i] for i in ids)
    start = facts.tokenizer.encode("a", add_special_tokens=False).ids
    decoded = facts.tokenizer.decode(start + ids, skip_special_tokens=False)
    try:
        assert decoded == "a" + joined.decode()
    except UnicodeDecodeError:
        assert "\ufffd" in decoded


@given(st.text(max_size=30))
def test_any_text_can_be_encoded_where_all_bytes_have_tokens(text: str) -> None:
    for kind in ("byte_level", "byte_fallback"):
        facts = facts_of(kind)
        ids = facts.encode(text)
        assert b"".join(facts.tokens[i] for i in ids) == text.encode()
        assert not facts.special_ids & set(ids)


def test_encoding_is_the_tokenizers_own_in_the_middle_of_an_answer() -> None:
    facts = facts_of("byte_fallback")
    whole = facts.tokenizer.encode("the quick", add_special_tokens=False).ids
    assert facts.tokens[whole[0]].startswith(b" ")
    assert facts.encode(" the quick")[-2:] == whole[-2:]
    assert facts_of("byte_level").encode("the quick") == byte_level().encode("the quick").ids


def test_a_text_that_names_a_control_token_is_not_that_token() -> None:
    for kind in KINDS:
        facts = facts_of(kind)
        for name, token_id in facts.special_names.items():
            ids = facts.encode(f"a{name}b")
            assert token_id not in ids
            assert b"".join(facts.tokens[i] for i in ids).decode() == f"a{name}b"


def test_unigram_pieces_and_bytes() -> None:
    tokenizer = unigram()
    facts = TokenizerFacts.from_tokenizer(
        tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(1,)
    )
    for text in ("the quick brown", "Hello world", "the{"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        joined = b"".join(facts.tokens[i] for i in ids).decode()
        assert joined.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_model_with_more_or_fewer_tokens_than_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_level()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    size = tokenizer.get_vocab_size()
    more = TokenizerFacts.load(path, vocab_size=size + 100, eos_token_ids=(1, size + 5))
    assert more.vocab_size == size + 100 and set(list(more.tokens)[size:]) == {b""}
    assert more.eos_token_ids == (1, size + 5)
    fewer = TokenizerFacts.load(path, vocab_size=300, eos_token_ids=(1, size + 5))
    assert fewer.vocab_size == 300 and fewer.eos_token_ids == (1,)
    ids = fewer.encode("the quick <tool_call>")
    assert max(ids) < 300 and b"".join(fewer.tokens[i] for i in ids) == b"the quick <tool_call>"


def test_end_tokens_are_control_tokens_whatever_the_tokenizer_says() -> None:
    tokenizer = byte_level()
    ordinary = tokenizer.token_to_id("<tool_call>")
    facts = TokenizerFacts.from_tokenizer(
        tokenizer, vocab_size=tokenizer.get_vocab_size(), eos_token_ids=(ordinary, 1)
    )
    assert ordinary in facts.special_ids
    assert ordinary not in facts.encode("<tool_call>")


def test_what_is_no_tokenizer_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": 1}))
    with pytest.raises(ConfigError, match="structured output needs"):
        TokenizerFacts.load(path, vocab_size=10, eos_token_ids=(1,))
    byte_fallback().save(str(path))
    with pytest.raises(ConfigError, match="eos_token_id"):
        TokenizerFacts.load(path, vocab_size=10, eos_token_ids=(10, -1))
