"""Which tokens may each constrained sequence take next? The worker's matchers and their bitmask.

A grammar is loaded once, in a thread beside the steps, and forked for every sequence that uses it. The
bitmask is filled after the forward pass was launched, which a GPU computes meanwhile; the sampler applies
it. Afterwards the matchers take the sampled tokens. At any time they may be asked which tokens must follow.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from radixrt.base.errors import RadixrtError
from radixrt.constrained.bitmask import bitmask_words
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.grammar import Grammar, GrammarKey
from radixrt.constrained.loader import fill_masks, load_grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, GrammarUse, LoadGrammar
from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.worker.sampling.exclusions import Exclusions, allow_only, forbid

log = logging.getLogger(__name__)

LOADING_THREADS = 4
ALL_TOKENS = -1
"""A word of the bitmask with every bit set."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """What the constrained rows of a batch may sample."""

    rows: NDArray[np.int64]  # [n] rows of the batch, ascending
    bits: NDArray[np.int32]  # [n, words], see radixrt.constrained.matcher


@dataclass(eq=False, slots=True)
class _Held:
    """A sequence that is held to a grammar."""

    matcher: Matcher
    begin_after: list[int]
    """The grammar begins after these; empty once it has begun."""
    may_jump: bool
    tail: list[int] = field(default_factory=list)
    """The last tokens before the grammar begins."""
    exclusions: Exclusions | None = None
    next_token: int | None = None
    """The matcher has taken it already: it must be sampled next."""
    failed: bool = False


class GrammarShop:
    """Loads grammars in threads, and holds the loaded ones."""

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
        self._loaded: dict[GrammarKey, Matcher] = {}
        self._threads = ThreadPoolExecutor(LOADING_THREADS, "load-grammar")

    def order(self, message: LoadGrammar | DropGrammar) -> None:
        """Begin to load a grammar, or drop one."""
        match message:
            case LoadGrammar():
                self._threads.submit(self._load, message.grammar)
            case DropGrammar():  # comes when every rank has answered the load
                self._loaded.pop(message.key, None)

    def matcher(self, key: GrammarKey) -> Matcher:
        """A new matcher of a loaded grammar, in its initial state."""
        return self._loaded[key].fork()

    def _load(self, grammar: Grammar) -> None:
        error = None
        try:
            self._loaded[grammar.key] = load_grammar(grammar, self._read_facts())
        except RadixrtError as refused:
            error = str(refused)
        except Exception:
            log.exception("A grammar that was compiled could not be loaded.")
            error = "The worker can't load the grammar; the server's log says more."
        with self._one_at_a_time:
            self._report(GrammarLoaded(key=grammar.key, error=error))

    def _read_facts(self) -> TokenizerFacts:
        with self._one_at_a_time:
            if self._facts is None:
                self._facts = TokenizerFacts.load(
                    self._tokenizer_file,
                    vocab_size=self._vocab_size,
                    eos_token_ids=self._eos_token_ids,
                )
            return self._facts


class GrammarState:
    """The matchers of all slots; owned by the worker."""

    def __init__(
        self,
        shop: GrammarShop,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int],
        jump_forward: bool = True,
    ) -> None:
        self.shop = shop
        self._num_words = bitmask_words(vocab_size)
        self._eos_token_ids = list(eos_token_ids)
        self._jump_forward = jump_forward
        self._held: dict[int, _Held] = {}

    def admit(self, slot: int, use: GrammarUse, output: TokenIds, *, may_jump: bool) -> None:
        """Hold the sequence of a slot to a grammar.

        Args:
            slot: a free one.
            use: which grammar, and from where on.
            output: what was generated before; taken again.
            may_jump: forced tokens may be given without being sampled.
        """
        held = _Held(
            self.shop.matcher(use.key),
            unpack_ids(use.begin_after).tolist(),
            may_jump,
        )
        self._held[slot] = held
        self._take(held, output[: use.excluded_from].tolist())
        if use.excluded and not held.failed:
            paths = [unpack_ids(path).tolist() for path in use.excluded]
            held.exclusions = Exclusions(held.matcher, paths, self._num_words)
        self._take(held, output[use.excluded_from :].tolist())

    def release(self, slot: int) -> None:
        self._held.pop(slot, None)

    @property
    def holds_any(self) -> bool:
        """Some sequence is held to a grammar."""
        return bool(self._held)

    # ------------------------------------------------------------ a step

    def mask(self, slots: NDArray[np.int64]) -> TokenMask | None:
        """What the rows ``slots`` [rows] may sample; None if none of them is constrained."""
        if not self._held:
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._held]
        if not rows:
            return None
        held = [self._held[int(slots[row])] for row in rows]
        bits = np.full((len(rows), self._num_words), ALL_TOKENS, dtype=np.int32)
        try:
            fill_masks([one.matcher if _is_masked(one) else None for one in held], bits)
        except GrammarExhausted:
            self._fill_one_by_one(held, bits)
        for row, one in zip(bits, held, strict=True):
            if one.next_token is not None:
                allow_only(row, one.next_token)
                one.next_token = None
            elif one.begin_after:
                forbid(row, self._eos_token_ids)
            elif one.exclusions is not None:
                one.exclusions.forbid(row)
            one.failed = one.failed or not row.any()
            if one.failed:
                row.fill(ALL_TOKENS)  # whatever is sampled now is not used
        return TokenMask(np.array(rows, dtype=np.int64), bits)

    def _fill_one_by_one(self, held: list[_Held], bits: NDArray[np.int32]) -> None:
        """Find out which matchers can't go on."""
        for row, one in zip(bits, held, strict=True):
            if not _is_masked(one):
                continue
            try:
                one.matcher.fill_mask(row)
            except GrammarExhausted as error:
                log.warning("A matcher gave up: %s", error)
                one.failed = True

    def advance(self, slots: NDArray[np.int64], token_ids: TokenIds) -> list[int]:
        """Take the sampled tokens [rows] of ``slots`` [rows]; returns the slots that can't go on."""
        failed: list[int] = []
        if not self._held:
            return failed
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            held = self._held.get(slot)
            if held is None or token < 0:
                continue
            self._take(held, [token])
            if held.failed:
                failed.append(slot)
        return failed

    def take_forced(self, slots: NDArray[np.int64], at_least: int = 1) -> dict[int, list[int]]:
        """The tokens that must come next in ``slots`` [rows]; the matchers have taken them.

        Args:
            at_least: fewer are not worth it, and left to be sampled.
        """
        if not self._held or not self._jump_forward:
            return {}
        all_forced = {
            slot: self._take_forced(held, at_least)
            for slot in slots.tolist()
            if (held := self._held.get(slot)) is not None and held.may_jump
        }
        return {slot: forced for slot, forced in all_forced.items() if forced}

    def sample_next(self, slot: int, token: int) -> None:
        """Let the next mask of a slot allow only this token, which :meth:`take_forced` has taken."""
        self._held[slot].next_token = token

    def _take_forced(self, held: _Held, at_least: int) -> list[int]:
        if held.begin_after or held.failed:
            return []
        try:
            tokens = held.matcher.forced_tokens()
            if len(tokens) + 1 < at_least:  # an end token may follow
                return []
            self._take(held, tokens)
            ended = held.matcher.is_terminated()
        except GrammarExhausted:
            return []  # the next mask will fail too, and say so
        return [*tokens, self._eos_token_ids[0]] if ended else tokens

    def _take(self, held: _Held, tokens: list[int]) -> None:
        if held.failed or not tokens:
            return
        for position, token in enumerate(tokens):
            if not held.begin_after:
                self._advance(held, tokens[position:])
                return
            held.tail = [*held.tail, token][-len(held.begin_after) :]
            if held.tail == held.begin_after:
                held.begin_after, held.tail = [], []

    def _advance(self, held: _Held, tokens: list[int]) -> None:
        if held.exclusions is not None:
            held.exclusions.advance(tokens)
        if tokens[-1] in self._eos_token_ids:  # the answer is over
            tokens = tokens[:-1]
        try:
            held.failed = held.matcher.advance(tokens) < len(tokens)
        except GrammarExhausted as error:
            log.warning("A matcher gave up: %s", error)
            held.failed = True


def _is_masked(held: _Held) -> bool:
    """Its matcher says what may come next."""
    return not held.begin_after and not held.failed and held.next_token is None
