"""Loads compiled grammars in threads beside the steps, and hands out matchers of the loaded
ones."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from radixrt.base.errors import RadixrtError
from radixrt.base.liveness.supervision import supervise
from radixrt.constrained.grammar import Grammar, GrammarKey
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.worker.sampling.tag_masks import TagMasks

log = logging.getLogger(__name__)

LOADING_THREADS = 4

RENEW_AFTER_S = 0.5
"""CPU time of slow masks after which an unused grammar is loaded again. A mask is slow where it
builds states of the lexer, which all copies of a matcher share and which take some 10 MB a second:
256 grammars that are kept for later requests would hold 10 GB."""


class LoadedGrammar:
    """A grammar that can be used."""

    __slots__ = ("grammar", "matcher", "num_users", "slow_s")

    def __init__(self, grammar: Grammar, matcher: Matcher) -> None:
        self.grammar = grammar
        self.matcher = matcher
        """The matcher in its initial state; it is forked for each use."""
        self.num_users = 0
        self.slow_s = 0.0
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
            vocab_size: of the model.
            eos_token_ids: of the model.
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
