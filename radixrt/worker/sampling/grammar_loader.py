"""Loads compiled grammars in threads beside the steps, and hands out matchers of the loaded ones;
and the masks of the tokens that may come before a grammar begins."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from radixrt.base.errors import RadixrtError
from radixrt.base.liveness.supervision import supervise
from radixrt.base.tags import GrammarStart, Symbols, fallbacks, token_symbols
from radixrt.base.token_bytes import SavedTokens, TokenBytes, TokenBytesTable
from radixrt.constrained.bitmask import BitmaskRow, bitmask_words
from radixrt.constrained.grammar import Grammar, GrammarKey
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts, read_tokenizer
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.worker.sampling.restrictions import allow, forbid


class TagMasks:
    """The bitmasks of one vocabulary.

    Args:
        tokenizer_file: a tokenizer.json, with its tokens saved beside it or not.
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


log = logging.getLogger(__name__)

LOADING_THREADS = 4

RENEW_AFTER_S = 0.5
"""CPU time of slow masks after which an unused grammar is loaded again. A mask is slow where it
builds states of the lexer, which all copies of a matcher share and which take some 10 MB a second:
256 grammars that are kept for later requests would hold 10 GB."""


@dataclass(slots=True, eq=False)
class LoadedGrammar:
    """A grammar that can be used."""

    grammar: Grammar
    matcher: Matcher
    """The matcher in its initial state; it is forked for each use."""
    num_users: int = 0
    slow_s: float = 0.0
    """CPU time of slow masks since it was loaded, in seconds."""


class GrammarLoader:
    """The loaded grammars of one rank."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        report: Callable[[GrammarLoaded], None],
    ) -> None:
        """
        Args:
            tokenizer_file: a tokenizer.json, read when the first grammar comes.
            report: is told of each grammar that is ready; called in threads, one at a time.
        """
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._report = report
        self._one_at_a_time = threading.Lock()
        self._facts: TokenizerFacts | None = None
        self._loaded: dict[GrammarKey, LoadedGrammar] = {}
        self._begun: dict[GrammarKey, float] = {}
        """Grammars that are being loaded, with the time of ``time.monotonic()`` at which that
        began."""
        self._reads_tags = threading.Lock()
        self._tag_masks: TagMasks | None = None
        self._threads = ThreadPoolExecutor(LOADING_THREADS, "load-grammar")

    def order(self, message: LoadGrammar | DropGrammar) -> None:
        """Begin to load a grammar, or drop one."""
        match message:
            case LoadGrammar():
                loading = self._threads.submit(self._load, message.grammar)
                supervise(loading, "The loading of a grammar", may_return=True)
            case DropGrammar():  # comes when every rank has answered the load
                self._loaded.pop(message.key, None)

    def use(self, key: GrammarKey) -> LoadedGrammar:
        """Take a loaded grammar for one more sequence. :meth:`release` follows."""
        loaded = self._loaded[key]
        loaded.num_users += 1
        return loaded

    def release(self, loaded: LoadedGrammar, slow_s: float) -> None:
        """Note that a sequence does not use a grammar any more, which may have been dropped.

        Args:
            slow_s: CPU time of its slow masks, in seconds.
        """
        loaded.num_users -= 1
        loaded.slow_s += slow_s
        is_there = self._loaded.get(loaded.grammar.key) is loaded
        if is_there and not loaded.num_users and loaded.slow_s > RENEW_AFTER_S:
            loaded.slow_s = 0.0
            renewing = self._threads.submit(self._renew, loaded)
            supervise(renewing, "The renewal of a grammar", may_return=True)

    @property
    def tag_masks(self) -> TagMasks:
        """The masks of the tokens before a grammar begins. They are ready once a grammar has been
        loaded."""
        with self._reads_tags:
            if self._tag_masks is None:
                self._tag_masks = TagMasks(
                    self._tokenizer_file, self._vocab_size, self._eos_token_ids
                )
            return self._tag_masks

    def seconds_at_work(self) -> float:
        """Time for which the slowest of the grammars has been loading; 0: none is."""
        begun = list(self._begun.values())  # a copy: threads change it
        return time.monotonic() - min(begun) if begun else 0.0

    def _load(self, grammar: Grammar) -> None:
        error = None
        self._begun[grammar.key] = time.monotonic()
        try:
            matcher = load_grammar(grammar, self._read_facts())
            self._loaded[grammar.key] = LoadedGrammar(grammar, matcher)
            self.tag_masks  # noqa: B018 (made here, and not in a step)
        except RadixrtError as refused:
            error = str(refused)
        except BaseException:  # a panic of a library in Rust is no Exception
            log.exception("A grammar that was compiled could not be loaded.")
            error = "The worker can't load the grammar; the server's log says more."
        self._begun.pop(grammar.key, None)
        with self._one_at_a_time:
            self._report(GrammarLoaded(key=grammar.key, error=error))

    def _renew(self, loaded: LoadedGrammar) -> None:
        """Load a grammar again, so that the states of its lexer are freed."""
        try:
            loaded.matcher = load_grammar(loaded.grammar, self._read_facts())
        except BaseException:  # a panic of a library in Rust is no Exception
            log.exception("A grammar could not be loaded again; it keeps its memory.")

    def _read_facts(self) -> TokenizerFacts:
        with self._one_at_a_time:
            if self._facts is None:
                self._facts = TokenizerFacts.load(
                    self._tokenizer_file,
                    vocab_size=self._vocab_size,
                    eos_token_ids=self._eos_token_ids,
                )
                self._facts.tokenizer  # noqa: B018 (read once, and not in a step)
            return self._facts
