"""Encoding by segments gives what encoding at once gives, and encodes only what is new."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from radixrt.messages.cache_root import CacheRoot
from radixrt.tokenizer.prompt import segments
from radixrt.tokenizer.prompt.kept_answers import ENTRY_BYTES
from radixrt.tokenizer.prompt.segments import SHORTEST_KEPT, SegmentEncoder, SegmentRules, joined
from tests.checkpoints.tiny_tokenizers import byte_fallback, byte_level
from tests.suite import examples


def metaspace() -> Tokenizer:
    """Like the newer Llama 2 files: only the very beginning of a text gets a space."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace}


def special_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    return [token for token in tokenizer.get_added_tokens_decoder().values() if token.special]


def encoder_of(tokenizer: Tokenizer) -> SegmentEncoder:
    return SegmentEncoder(
        tokenizer, SegmentRules.from_tokenizer(tokenizer, special_tokens(tokenizer))
    )


def at_once(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class Counting:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.seen: list[str] = []

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool) -> list:
        self.seen += texts
        return self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool) -> list[str]:
        texts: list[str] = self.tokenizer.decode_batch(sequences, skip_special_tokens)
        return texts

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.tokenizer.get_added_tokens_decoder()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_segments_add_up_to_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]()
    encoder = encoder_of(tokenizer)
    contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    piece = st.one_of(
        st.sampled_from(
            [*contents, *(content[:3] for content in contents), " ", "\n", "the fox " * 50]
        ),
        st.text(max_size=12),
    )
    for text in data.draw(
        st.lists(st.lists(piece, max_size=12).map("".join), min_size=1, max_size=3)
    ):
        for _ in range(2):  # the second time from memory
            found = encoder.encode(text)
            assert joined(found) == at_once(tokenizer, text)
            assert "".join(segment.text for segment in found) == text
            assert all(text.startswith(segment.text, segment.start) for segment in found)


def test_only_new_messages_are_encoded() -> None:
    counting = Counting(byte_level())
    encoder = encoder_of(counting)  # type: ignore[arg-type]
    turn = "<|im_start|>user\n" + "the quick brown fox " * 40
    encoder.encode(turn)
    counting.seen.clear()
    longer = turn + "<|im_end|>\n<|im_start|>assistant\n" + "jumps " * 100
    assert joined(encoder.encode(longer)) == at_once(counting.tokenizer, longer)
    assert turn not in counting.seen and sum(map(len, counting.seen)) == len(longer) - len(turn)
    counting.seen.clear()
    encoder.encode(turn, root=CacheRoot("tenant"))
    assert counting.seen == [turn], "another salt must not be served from memory"


def test_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(byte_level())
    texts = [f"<|im_start|>{number}" + "!" * SHORTEST_KEPT for number in range(4)]
    monkeypatch.setattr(
        segments,
        "CAPACITY_BYTES",
        3 * (ENTRY_BYTES + 4 * len(at_once(counting.tokenizer, texts[0]))),
    )
    encoder = encoder_of(counting)  # type: ignore[arg-type]
    for text in [*texts[:3], texts[0], texts[3]]:
        encoder.encode(text)
    counting.seen.clear()
    for text in [texts[0], texts[2], texts[3], texts[1]]:
        encoder.encode(text)
    assert counting.seen == [texts[1]]


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<eats>", special=True, normalized=False, lstrip=True),
        AddedToken("<word>", special=True, normalized=False, single_word=True),
        AddedToken("m_sta", special=True, normalized=False),  # within <|im_start|>
    ],
    ids=["lstrip", "single_word", "inside_another"],
)
def test_tokens_that_do_not_split_cleanly_are_not_split_at(token: AddedToken) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([token])
    encoder = encoder_of(tokenizer)
    text = f"a  {token.content} b<|im_start|> x{token.content}" * 3
    found = encoder.encode(text)
    assert joined(found) == at_once(tokenizer, text) and len(found) == 4
