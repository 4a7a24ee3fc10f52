"""The parts of examples/rag_pipeline that need no vector store."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "rag_pipeline"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    import books
    import texts
    import vectors

    yield SimpleNamespace(books=books, texts=texts, vectors=vectors)
    sys.path[:] = path
    for name in {"books", "texts", "vectors", "world"} - before:
        sys.modules.pop(name, None)


def test_hashed_letters_find_the_passage_of_a_question(example: Any) -> None:
    passages, questions = example.books.library(20, 8)
    asked = example.books.visits(questions, 200)
    assert len({one.id for one in passages}) == len(passages) == 160
    vectors = example.vectors.hashed([one.text for one in passages])
    found = example.vectors.hashed([one.text for one in asked]) @ vectors.T
    best = [passages[index] for index in np.argmax(found, axis=1)]
    right = sum(one.source == other.id for one, other in zip(asked, best, strict=True))
    assert right >= 190
    assert all(one.answer in other.text for one, other in zip(asked, best, strict=True) if one.source == other.id)  # fmt: skip


def test_real_text_is_cut_at_paragraphs_and_only_short_rests_are_left_out(example: Any) -> None:
    paragraphs = [f"Paragraph {n} says " + "a word and another " * (3 * n) for n in range(1, 30)]
    passages = list(example.texts.cut("topic", "\n\n".join(paragraphs)))
    whole = " ".join(" ".join(paragraphs).split())
    cut = [" ".join(one.text.split()) for one in passages]
    assert all(text in whole for text in cut) and sum(map(len, cut)) > 0.9 * len(whole)
    assert max(len(one.text) for one in passages) <= example.texts.MAX_CHARACTERS
    assert min(len(one.text) for one in passages) >= example.texts.MIN_CHARACTERS
    assert passages[0].text.count("Paragraph") > 1
    some = example.texts.passages(40)
    assert len(some) == len({one.id for one in some}) == 40
