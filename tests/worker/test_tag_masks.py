"""The masks before a grammar begins, against their definition, in small random vocabularies."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.base.tags import GrammarStart, Symbols, TagFinder
from radixrt.base.token_bytes import SavedTokens, TokenBytesTable
from radixrt.constrained.bitmask import allows
from radixrt.worker.sampling.grammar_loader import TagMasks

EOS, CONTROL, NO_TOKEN = 0, 1, 2
TOKENS = st.lists(st.text("<ab> ", min_size=1, max_size=6), min_size=1, max_size=30, unique=True)
TAGS = st.one_of(
    st.text("<ab>", min_size=1, max_size=5).map(lambda text: tuple(text.encode())),
    st.sampled_from([(-1 - CONTROL,), (-1 - CONTROL, *b"ab")]),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "tokenizer.json"


def masks_of(file: Path, tokens: list[str]) -> TagMasks:
    """The masks of a vocabulary that has these tokens behind the first three."""
    table = TokenBytesTable.from_tokens([b"</s>", b"<ab>", b"", *map(str.encode, tokens)])
    SavedTokens((EOS, CONTROL), table.ends.tobytes(), table.data).save(file)
    return TagMasks(file, 3 + len(tokens), [EOS])


def flattened(masks: TagMasks, ids: list[int]) -> Symbols:
    return tuple(symbol for token in ids for symbol in masks.symbols_of(token))


def first_end(symbols: Symbols, tag: Symbols) -> int | None:
    ends = range(len(tag), len(symbols) + 1)
    return next((end for end in ends if symbols[end - len(tag) : end] == tag), None)


@settings(max_examples=50)
@given(tokens=TOKENS, tag=TAGS, data=st.data())
def test_a_tag_ends_with_its_token(
    file: Path, tokens: list[str], tag: Symbols, data: st.DataObject
) -> None:
    masks = masks_of(file, tokens)
    every = range(1, 3 + len(tokens))
    start = GrammarStart((), tag)
    taken: list[int] = []
    while not start.has_begun and len(taken) < 12:
        row = masks.waiting(start)
        assert not allows(row, EOS)
        for token in every:
            symbols = flattened(masks, [*taken, token])
            assert allows(row, token) == (first_end(symbols, tag) in (None, len(symbols)))
        token = data.draw(st.sampled_from([token for token in every if allows(row, token)]))
        taken.append(token)
        start.push(masks.symbols_of(token))
        assert start.has_begun == (first_end(flattened(masks, taken), tag) is not None)


@settings(max_examples=50)
@given(tokens=TOKENS, opening=TAGS, data=st.data())
def test_exactly_the_tokens_of_an_opening_are_added(
    file: Path, tokens: list[str], opening: Symbols, data: st.DataObject
) -> None:
    masks = masks_of(file, tokens)
    every = range(1, 3 + len(tokens))
    start, taken = GrammarStart(opening, (7,)), list[int]()
    while start.opened is None:
        row = masks.openers(start)
        fitting = []
        for token in every:
            symbols = flattened(masks, [*taken, token])
            bare = symbols[symbols[0] == ord(" ") :]
            length = min(len(bare), len(opening))
            fits = length > 0 and bare[:length] == opening[:length]
            assert allows(row, token) == fits, (token, symbols)
            after = start.fork()
            after.push(masks.symbols_of(token))
            assert (after.opened is not False) == fits
            fitting += [token] * fits
        if not fitting:
            return
        taken.append(data.draw(st.sampled_from(fitting)))
        start.push(masks.symbols_of(taken[-1]))
    assert start.opened and not start.has_begun


@given(text=st.text("ab", max_size=20), tag=st.text("ab", min_size=1, max_size=5), cut=st.integers(0, 20))  # fmt: skip
def test_a_tag_is_found_where_it_first_ends(text: str, tag: str, cut: int) -> None:
    finder, found = TagFinder(tuple(tag.encode())), None
    for begin, piece in ((0, text[:cut]), (cut, text[cut:])):
        if found is None and (used := finder.push(tuple(piece.encode()))) is not None:
            found = begin + used
    assert found == (text.index(tag) + len(tag) if tag in text else None)


def test_the_rows_of_a_large_vocabulary_are_made_once(file: Path) -> None:
    masks = masks_of(file, [f"a{number}>" for number in range(100)])
    start = GrammarStart(tuple(b"<a>"), tuple(b"</a>"))
    assert masks.openers(start) is masks.openers(start.fork())
    start.push(tuple(b"<a>"))
    assert masks.waiting(start) is masks.waiting(start.fork())
    assert np.array_equal(masks.waiting(start), masks_of(file, ["b"] * 100).waiting(start))
