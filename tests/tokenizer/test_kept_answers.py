"""A conversation's earlier answers are the tokens that were generated, whatever the tokenizer would
make of them."""

import random
import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from radixrt.messages.cache_root import BASE_ROOT, CacheRoot
from radixrt.tokenizer.prompt import kept_answers
from radixrt.tokenizer.prompt.kept_answers import ENTRY_BYTES, KeptAnswers, TokenMemory
from radixrt.tokenizer.prompt.segments import joined
from tests.checkpoints.tiny_tokenizers import byte_fallback, byte_level
from tests.suite import examples
from tests.tokenizer.test_segments import at_once, encoder_of, metaspace, special_tokens


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text in as many tokens as it has characters."""
    return [i for character in text for i in at_once(tokenizer, character)]


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_a_conversation_begins_with_its_earlier_prompt_and_answer(data: st.DataObject) -> None:
    """With any template: ``marked`` ones write special tokens, others plain words."""
    tokenizer = byte_level()
    encoder = encoder_of(tokenizer)
    words = st.text("ab \n.é😀", min_size=1, max_size=12)
    ask, reply, end = data.draw(
        st.sampled_from(
            [
                ("<|im_start|>user\n", "<|im_end|><|im_start|>assistant\n", "<|im_end|>"),
                ("user: ", "\nassistant: ", "\n"),
                ("", "", ""),
            ]
        )
    )
    text, before, ends = "", [], []
    for _ in range(data.draw(st.integers(1, 4))):
        prompt = text + ask + data.draw(words) + reply
        ids = joined(encoder.encode(prompt, CacheRoot(salt="salt"), ends))
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
        assert ids[: len(before)] == before, "the KV of prompt and answer can be used again"
        answer = data.draw(words)
        spoken = spelled(tokenizer, answer)
        encoder.answers.keep(prompt, answer, spoken, CacheRoot(salt="salt"))
        before, text = ids + spoken, prompt + answer + end
        ends = [*ends, len(prompt + answer)]


def test_another_conversation_or_salt_is_encoded_by_the_tokenizer() -> None:
    tokenizer = byte_level()
    encoder = encoder_of(tokenizer)
    prompt, answer = "<|im_start|>user\nhi<|im_start|>assistant\n", "the quick brown fox"
    spoken = spelled(tokenizer, answer)
    encoder.answers.keep(prompt, answer, spoken, CacheRoot(salt="mine"))
    text = prompt + answer + "<|im_end|>"
    assert spoken != at_once(tokenizer, answer)
    assert joined(encoder.encode(text, CacheRoot(salt="mine"))) == [
        *at_once(tokenizer, prompt), *spoken, *at_once(tokenizer, "<|im_end|>")
    ]  # fmt: skip
    assert joined(encoder.encode(text, CacheRoot(salt="yours"))) == at_once(tokenizer, text)
    other = text.replace("hi", "ho")
    assert joined(encoder.encode(other, CacheRoot(salt="mine"))) == at_once(tokenizer, other)


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
def test_where_a_text_cannot_be_cut_anywhere_only_special_tokens_end_answers(
    make: Callable[[], Tokenizer],
) -> None:
    """Such tokenizers write a space in front of every text that they encode."""
    tokenizer = make()
    encoder = encoder_of(tokenizer)
    special = special_tokens(tokenizer)[-1].content
    prompt, answer = f"{special}user hi{special}", "the quick brown fox"
    encoder.answers.keep(prompt, answer, [5, 6, 7], BASE_ROOT)
    cut, marked = f"{prompt}{answer} and", f"{prompt}{answer}{special}"
    assert joined(encoder.encode(cut, BASE_ROOT, [len(prompt + answer)])) == at_once(tokenizer, cut)
    assert [5, 6, 7] in [segment.ids.tolist() for segment in encoder.encode(marked)]


def test_answers_in_doubt_do_not_overlap() -> None:
    kept = KeptAnswers()
    kept.keep("a", "bcd", [1], BASE_ROOT)
    kept.keep("ab", "cdef", [2], BASE_ROOT)
    kept.keep("abcd", "efg", [3], BASE_ROOT)
    found = kept.find("abcdefg", [4, 6, 7], BASE_ROOT)
    assert [(each.start, each.end, each.ids.tolist()) for each in found] == [
        (1, 4, [1]),
        (4, 7, [3]),
    ]


def test_memory_holds_what_was_used_last() -> None:
    sizes = random.Random(0)
    memory: TokenMemory[int] = TokenMemory(10 * (ENTRY_BYTES + 20))
    model: dict[bytes, int] = {}
    for step in range(2000):
        key = bytes([sizes.randrange(30)])
        if sizes.random() < 0.5:
            assert (memory.find(key) is not None) == (key in model)
            if key in model:
                model[key] = model.pop(key)
        else:
            size = sizes.randrange(40)
            memory.keep(key, step, size)
            model.pop(key, None)
            model[key] = size
            while sum(size + ENTRY_BYTES for size in model.values()) > 10 * (ENTRY_BYTES + 20):
                del model[next(iter(model))]
        assert len(memory) == len(model)


def test_what_is_larger_than_the_memory_drops_nothing_but_its_earlier_value() -> None:
    memory: TokenMemory[str] = TokenMemory(2 * ENTRY_BYTES + 20)
    memory.keep(b"a", "small", 10)
    memory.keep(b"b", "small", 10)
    memory.keep(b"c", "large", ENTRY_BYTES + 21)
    assert [memory.find(key) for key in (b"a", b"b", b"c")] == ["small", "small", None]
    memory.keep(b"b", "large", ENTRY_BYTES + 21)
    memory.keep(b"c", "small", 10)
    assert [memory.find(key) for key in (b"a", b"b", b"c")] == ["small", None, "small"]


def test_kept_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "CAPACITY_BYTES", 3 * (ENTRY_BYTES + 4))
    kept = KeptAnswers()
    for number in range(4):
        kept.keep(f"{number}", "x", [number], BASE_ROOT)
    assert [len(kept.find(f"{number}x", [2], BASE_ROOT)) for number in range(4)] == [0, 1, 1, 1]


@pytest.mark.parametrize("length", [1, 50, 1000])
def test_the_bound_is_one_of_memory(length: int) -> None:
    kept = KeptAnswers()
    kept.memory.limit(200_000)
    tracemalloc.start()
    try:
        for number in range(800):
            kept.keep(str(number), "x", [7] * length, BASE_ROOT)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 120_000 < used < 220_000
