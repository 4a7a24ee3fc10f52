"""Finds the tags around a reasoning in an answer, in whatever tokens the model writes them.

A tag is compared as symbols: the bytes of its text, and control tokens, each of which is one
symbol. So a tag of text is found however the vocabulary splits it, and text never counts as a
control token.
"""

import copy
import functools
from collections.abc import Callable, Iterable

Symbols = tuple[int, ...]
"""Bytes, and negative numbers: a control token, or an id without text, is -1 minus its id."""
SymbolsOf = Callable[[int], Symbols]
"""The symbols of a token."""

_SPACE = ord(" ")


def token_symbols(token_id: int, text: bytes, *, is_control: bool) -> Symbols:
    """The symbols of a token with these bytes."""
    return tuple(text) if text and not is_control else (-1 - token_id,)


def tag_symbols(token_ids: Iterable[int], symbols_of: SymbolsOf) -> Symbols:
    """The symbols of a tag that is encoded as ``token_ids``, without the space that some tokenizers
    put before a text."""
    symbols = [symbol for token_id in token_ids for symbol in symbols_of(token_id)]
    return tuple(symbols[symbols[:1] == [_SPACE] and len(symbols) > 1 :])


@functools.lru_cache(64)
def fallbacks(tag: Symbols) -> tuple[int, ...]:
    """The next smaller number, for each number of matched symbols, that is matched too [len(tag)]
    (Knuth, Morris and Pratt)."""
    found = [0] * len(tag)
    for matched in range(2, len(tag)):
        shorter = found[matched - 1]
        while shorter and tag[shorter] != tag[matched - 1]:
            shorter = found[shorter]
        found[matched] = shorter + (tag[shorter] == tag[matched - 1])
    return tuple(found)


class TagFinder:
    """Looks for the first occurrence of a tag.

    Attributes:
        tag: at least one symbol.
        matched: the symbols of the tag with which the text ends.
    """

    def __init__(self, tag: Symbols) -> None:
        self.tag = tag
        self.matched = 0

    def push(self, symbols: Symbols) -> int | None:
        """Go on; returns how many of ``symbols`` there are up to the end of the tag, or None if it
        has not ended."""
        shorter = fallbacks(self.tag)
        for number, symbol in enumerate(symbols, 1):
            while self.matched and self.tag[self.matched] != symbol:
                self.matched = shorter[self.matched]
            self.matched += self.tag[self.matched] == symbol
            if self.matched == len(self.tag):
                self.matched = 0
                return number
        return None


class GrammarStart:
    """The place in an answer where its grammar begins, followed token by token.

    Args:
        opening: if given, the grammar begins at once unless the answer begins with this tag, which
            may follow a space.
        closing: the grammar begins behind this tag; empty: at once.
        then: if given, behind this tag after ``closing`` instead.

    Attributes:
        opened: the answer began with ``opening``, or needs none; None: that is not decided yet.
        has_begun: the next token is the grammar's. Where ``opened`` is False, the tokens so far
            were, too.
        num_opened: matched symbols of ``opening``.
        finder: of the next tag.
    """

    def __init__(self, opening: Symbols, closing: Symbols, then: Symbols = ()) -> None:
        self.opening = opening
        self.opened = None if opening else True
        self.has_begun = not closing
        self.num_opened = 0
        self.finder = TagFinder(closing)
        self._then = then

    def fork(self) -> "GrammarStart":
        """The same, to be followed apart."""
        fork = copy.copy(self)
        fork.finder = copy.copy(self.finder)
        return fork

    def push(self, symbols: Symbols) -> None:
        """Take a token of the answer, before the grammar has begun."""
        if self.opened is None:
            if self.num_opened == 0 and symbols[0] == _SPACE:
                symbols = symbols[1:]
            left = self.opening[self.num_opened :]
            length = min(len(left), len(symbols))
            if length == 0 or symbols[:length] != left[:length]:
                self.opened, self.has_begun = False, True
                return
            self.num_opened += length
            if self.num_opened < len(self.opening):
                return
            self.opened, symbols = True, symbols[length:]
        while (used := self.finder.push(symbols)) is not None:
            if not self._then:
                self.has_begun = True
                return
            self.finder, self._then, symbols = TagFinder(self._then), (), symbols[used:]
