"""The texts of nodes of the radix tree that views repeat."""

import random
import tracemalloc

import pytest
from transformers import PreTrainedTokenizerFast

from radixrt.messages.ids import pack_ids
from radixrt.tokenizer.calls import NodeTexts
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.tiny_tokenizers import byte_level

RNG = random.Random(1)
NODES = [pack_ids(RNG.choices(range(3, 300), k=32)) for _ in range(3000)]


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(PreTrainedTokenizerFast(tokenizer_object=byte_level()))


def test_memory_is_bounded_by_its_bytes(vocabulary: Vocabulary) -> None:
    max_bytes = 1 << 19
    texts = NodeTexts(vocabulary, max_bytes)
    tracemalloc.start()
    try:
        for ids in NODES:
            texts.text_of(bytes(bytearray(ids)))  # of its own, as in each view
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.6 * max_bytes < used < 1.1 * max_bytes


def test_a_text_is_decoded_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = NodeTexts(vocabulary, 1 << 19)
    first = [texts.text_of(ids) for ids in NODES[:100]]
    assert first == [vocabulary.decode(memoryview(ids).cast("i").tolist()) for ids in NODES[:100]]
    monkeypatch.setattr(vocabulary, "decode", None)
    assert [texts.text_of(ids) for ids in NODES[:100]] == first
