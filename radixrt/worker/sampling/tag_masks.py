"""The tokens that may come before a grammar begins: every tag ends with its token, so that the
grammar begins right behind it.

A token that completes a tag and goes on (``>`` with a line break) is forbidden where it would do
so. Which tokens these are depends on the matched part of the tag alone, so each part's bitmask is
made once.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from radixrt.base.tags import GrammarStart, Symbols, fallbacks, token_symbols
from radixrt.base.token_bytes import SavedTokens, TokenBytes, TokenBytesTable
from radixrt.constrained.bitmask import BitmaskRow, bitmask_words
from radixrt.constrained.tokenizer_facts import read_tokenizer
from radixrt.worker.sampling.forbidden_paths import allow, forbid


class TagMasks:
    """The bitmasks of one vocabulary.

    Args:
        tokenizer_file: a tokenizer.json, with its tokens saved beside it or not.
        vocab_size: of the model.
        eos_token_ids: forbidden before the grammar begins.

    Raises:
        ConfigError: the file is no tokenizer.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._num_words = bitmask_words(vocab_size)
        self._eos_token_ids = eos_token_ids
        saved = SavedTokens.load(tokenizer_file)
        if saved is None:
            tokens = TokenBytes(read_tokenizer(tokenizer_file))
            self._table = TokenBytesTable.from_tokens(map(tokens.bytes_of, range(vocab_size)))
            self._control_ids = tokens.special_ids
        else:
            self._table, self._control_ids = saved.table, frozenset(saved.special_ids)
        self._bytes = np.frombuffer(self._table.data, dtype=np.uint8)
        self._ends = np.array(self._table.ends[:vocab_size], dtype=np.int64)  # [tokens]
        self._begins = np.concatenate(([0], self._ends[:-1]))
        self._waiting: dict[tuple[Symbols, int], BitmaskRow] = {}
        self._openers: dict[tuple[Symbols, int], BitmaskRow] = {}

    def symbols_of(self, token_id: int) -> Symbols:
        text = self._table.bytes_of(token_id) or b""
        return token_symbols(token_id, text, is_control=token_id in self._control_ids)

    def waiting(self, start: GrammarStart) -> BitmaskRow:
        """The tokens that may come next while the grammar has not begun. Read-only."""
        tag, matched = start.finder.tag, start.finder.matched
        if (row := self._waiting.get((tag, matched))) is None:
            row = np.full(self._num_words, -1, dtype=np.int32)
            forbid(row, self._eos_token_ids)
            forbid(row, self._going_on(tag, matched))
            self._waiting[tag, matched] = row
        return row

    def openers(self, start: GrammarStart) -> BitmaskRow:
        """The tokens that go on with the opening of an answer of which nothing else is known.
        Read-only."""
        opening, matched = start.opening, start.num_opened
        if (row := self._openers.get((opening, matched))) is None:
            row = np.zeros(self._num_words, dtype=np.int32)
            for token in self._going_along(opening, matched):
                allow(row, token)
            self._openers[opening, matched] = row
        return row

    def _going_on(self, tag: Symbols, matched: int) -> set[int]:
        """The tokens that complete a tag and have more, behind the first ``matched`` symbols of
        it."""
        found: set[int] = set()
        text = _text_of(tag)
        position = self._table.data.find(text) if text else -1
        while position >= 0:  # all of the tag lies in the token
            token = int(np.searchsorted(self._ends, position, side="right"))
            if token < len(self._ends) and position + len(tag) < self._ends[token]:
                found.add(token)
            position = self._table.data.find(text, position + 1)
        while matched:
            if rest := _text_of(tag[matched:]):
                found.update(self._beginning_with(rest, longer=True))
            matched = fallbacks(tag)[matched]
        return found - self._control_ids

    def _going_along(self, opening: Symbols, matched: int) -> set[int]:
        """The tokens that are a part of an opening behind its first ``matched`` symbols, or
        complete it and have more."""
        left = opening[matched:]
        if left[0] < 0:
            return {-1 - left[0]}
        text = bytes(left[: next((i for i, symbol in enumerate(left) if symbol < 0), len(left))])
        found: set[int] = set()
        for lead in (b"", b" ") if matched == 0 else (b"",):
            for length in range(1, len(text) + 1):
                found.update(self._beginning_with(lead + text[:length], longer=False))
            if len(text) == len(left):
                found.update(self._beginning_with(lead + text, longer=True))
        return found - self._control_ids

    def _beginning_with(self, text: bytes, *, longer: bool) -> list[int]:
        """The tokens that begin with a text and are longer, or those that are the text."""
        lengths = self._ends - self._begins
        tokens: NDArray[np.int64] = np.flatnonzero(
            lengths > len(text) if longer else lengths == len(text)
        )
        for index, byte in enumerate(text):
            tokens = tokens[self._bytes[self._begins[tokens] + index] == byte]
        found: list[int] = tokens.tolist()
        return found


def _text_of(symbols: Symbols) -> bytes:
    """The text of symbols; b"" if a control token is among them."""
    return b"" if any(symbol < 0 for symbol in symbols) else bytes(symbols)
