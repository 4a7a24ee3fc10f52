"""Streaming detokenization against the library's decoding of the whole."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from radixrt.tokenizer.answer.detokenizer import MAX_PENDING_TOKENS, IncrementalDetokenizer
from tests.checkpoints.tiny_tokenizers import byte_fallback, byte_level

KINDS = ["byte_level", "byte_fallback"]


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind]()


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)


def stream(
    tokenizer: Tokenizer, ids: list[int], skip: bool = True, context: list[int] | None = None
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, special_ids(tokenizer), skip, context or [])
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


# Half of the strings are ordinary, half draw on all of Unicode.
texts = st.one_of(
    st.text(st.sampled_from("aeh to�é你👩‍👧 \n.<|im_end|>"), max_size=40),
    st.text(max_size=40),
    st.text("\ufffd\U0001f98aa", max_size=16),
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
def test_any_text_streamed_equals_the_whole_decoded(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@given(before=texts, after=texts)
def test_an_answer_that_continues_a_prompt_is_what_it_adds_to_it(
    kind: str, before: str, after: str
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(before + after, add_special_tokens=False).ids
    for cut in range(len(ids) + 1):
        prompt = tokenizer.decode(ids[:cut])
        if not prompt.endswith("\ufffd"):
            answer = "".join(stream(tokenizer, ids[cut:], context=ids[:cut]))
            assert prompt + answer == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 399), max_size=60))
def test_random_byte_level_tokens_streamed_equal_the_whole_decoded_or_lag_by_a_restart(
    ids: list[int],
) -> None:
    """Random tokens are mostly invalid UTF-8; text is never lost or repeated but at a restart."""
    tokenizer = tokenizer_of("byte_level")
    pieces = stream(tokenizer, ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces).replace("\ufffd", "") == whole.replace("\ufffd", "")


@settings(max_examples=50)
@given(ids=st.lists(st.integers(0, 250), max_size=40))
def test_random_byte_fallback_tokens_never_raise(ids: list[int]) -> None:
    stream(tokenizer_of("byte_fallback"), ids)


def test_a_character_of_several_tokens_comes_out_once_it_is_complete() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("\U0001f98a", add_special_tokens=False).ids
    assert len(ids) > 1
    assert stream(tokenizer, ids) == [*[""] * (len(ids) - 1), "\U0001f98a", ""]


def test_an_incomplete_character_at_the_end_is_a_replacement_character() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("a\U0001f98a", add_special_tokens=False).ids[:-1]
    assert "".join(stream(tokenizer, ids)) == "a\ufffd"


def test_a_prompt_that_ends_inside_a_character_is_not_repeated_in_the_answer() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("hello \U0001f98a ok", add_special_tokens=False).ids
    split = next(i for i in range(len(ids)) if tokenizer.decode(ids[:i]).endswith("\ufffd"))
    answer = "".join(stream(tokenizer, ids[split:], context=ids[:split]))
    assert "hello" not in answer and answer.endswith(" ok")


def test_text_that_never_becomes_a_character_is_given_out_before_it_piles_up() -> None:
    tokenizer = tokenizer_of("byte_level")
    continuation = tokenizer.token_to_id("\u0122")  # byte 0x80: never begins a character
    pieces = stream(tokenizer, [continuation] * 100)
    longest_silence = max(map(len, "".join("x" if p else " " for p in pieces).split("x")))
    assert longest_silence <= MAX_PENDING_TOKENS
    assert "".join(pieces) == "\ufffd" * 100


def test_special_tokens_are_shown_only_where_asked_for() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("hi<|im_end|> there", add_special_tokens=False).ids
    assert "".join(stream(tokenizer, ids)) == "hi there"
    assert "".join(stream(tokenizer, ids, skip=False)) == "hi<|im_end|> there"


def test_the_first_word_keeps_its_space_only_where_it_continues_a_prompt() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    prompt, answer = (
        tokenizer.encode(text, add_special_tokens=False).ids for text in ("Hello", "the")
    )
    assert "".join(stream(tokenizer, answer, context=prompt)) == " the"
    assert "".join(stream(tokenizer, answer)) == "the"
