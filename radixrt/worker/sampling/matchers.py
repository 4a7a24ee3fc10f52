"""Keeps the matcher of each constrained slot, and fills the bitmask of tokens that each may sample next.

A grammar is loaded once (:mod:`radixrt.worker.sampling.grammar_loader`) and its matcher forked for every sequence
that uses it. The bitmask is filled after the forward pass was launched, which a GPU computes meanwhile; the sampler
applies it. Then the matchers take the sampled tokens. They can also list the tokens that must follow (jump-forward).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixrt.constrained.bitmask import bitmask_words
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.loader import fill_masks
from radixrt.constrained.matcher import Matcher
from radixrt.messages.grammars import GrammarUse
from radixrt.messages.ids import TokenIds, unpack_ids
from radixrt.worker.sampling.forbidden_paths import ForbiddenPaths, allow_only, forbid
from radixrt.worker.sampling.grammar_loader import GrammarLoader

log = logging.getLogger(__name__)

ALL_TOKENS = -1
"""A word of the bitmask with every bit set."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that the constrained rows of a batch may sample."""

    rows: NDArray[np.int64]  # [n] rows of the batch, ascending
    bits: NDArray[np.int32]  # [n, words], see radixrt.constrained.bitmask


@dataclass(eq=False, slots=True)
class _SlotMatcher:
    """The state of one constrained sequence."""

    matcher: Matcher
    begin_after: list[int]
    """The grammar begins after these; empty once it has begun."""
    may_jump: bool
    tail: list[int] = field(default_factory=list)
    """The last tokens before the grammar begins."""
    forbidden: ForbiddenPaths | None = None
    next_token: int | None = None
    """The matcher has taken it already: it must be sampled next."""
    failed: bool = False


class SlotMatchers:
    """The matchers of all slots; owned by the worker."""

    def __init__(
        self,
        loader: GrammarLoader,
        vocab_size: int,
        *,
        eos_token_ids: Sequence[int],
        jump_forward: bool = True,
    ) -> None:
        self.loader = loader
        self._num_words = bitmask_words(vocab_size)
        self._eos_token_ids = list(eos_token_ids)
        self._jump_forward = jump_forward
        self._by_slot: dict[int, _SlotMatcher] = {}

    def admit(self, slot: int, use: GrammarUse, output: TokenIds, *, may_jump: bool) -> None:
        """Hold the sequence of a slot to a grammar.

        Args:
            slot: a free one.
            use: which grammar, and from where on.
            output: the tokens generated before a retraction; the matcher takes them again.
            may_jump: forced tokens may be given without being sampled.
        """
        entry = _SlotMatcher(
            self.loader.matcher(use.key),
            unpack_ids(use.begin_after).tolist(),
            may_jump,
        )
        self._by_slot[slot] = entry
        self._take(entry, output[: use.excluded_from].tolist())
        if use.excluded and not entry.failed:
            paths = [unpack_ids(path).tolist() for path in use.excluded]
            entry.forbidden = ForbiddenPaths(entry.matcher, paths, self._num_words)
        self._take(entry, output[use.excluded_from :].tolist())

    def release(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    @property
    def holds_any(self) -> bool:
        """Some sequence is held to a grammar."""
        return bool(self._by_slot)

    # ------------------------------------------------------------ a step

    def mask(self, slots: NDArray[np.int64]) -> TokenMask | None:
        """The allowed tokens of the rows ``slots`` [rows]; None if no row is constrained."""
        if not self._by_slot:
            return None
        rows = [row for row, slot in enumerate(slots.tolist()) if slot in self._by_slot]
        if not rows:
            return None
        entries = [self._by_slot[int(slots[row])] for row in rows]
        bits = np.full((len(rows), self._num_words), ALL_TOKENS, dtype=np.int32)
        try:
            fill_masks([one.matcher if _is_masked(one) else None for one in entries], bits)
        except GrammarExhausted:
            self._fill_one_by_one(entries, bits)
        for row, one in zip(bits, entries, strict=True):
            if one.next_token is not None:
                allow_only(row, one.next_token)
                one.next_token = None
            elif one.begin_after:
                forbid(row, self._eos_token_ids)
            elif one.forbidden is not None:
                one.forbidden.forbid(row)
            one.failed = one.failed or not row.any()
            if one.failed:
                row.fill(ALL_TOKENS)  # the sampled token is not used
        return TokenMask(np.array(rows, dtype=np.int64), bits)

    def _fill_one_by_one(self, entries: list[_SlotMatcher], bits: NDArray[np.int32]) -> None:
        """Fill the masks one by one, and mark the matchers that fail."""
        for row, one in zip(bits, entries, strict=True):
            if not _is_masked(one):
                continue
            try:
                one.matcher.fill_mask(row)
            except GrammarExhausted as error:
                log.warning("Matcher failed: %s", error)
                one.failed = True

    def advance(self, slots: NDArray[np.int64], token_ids: TokenIds) -> list[int]:
        """Take the sampled tokens [rows] of ``slots`` [rows]; returns the slots that can't go on."""
        failed: list[int] = []
        if not self._by_slot:
            return failed
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            entry = self._by_slot.get(slot)
            if entry is None or token < 0:
                continue
            self._take(entry, [token])
            if entry.failed:
                failed.append(slot)
        return failed

    def take_forced(self, slots: NDArray[np.int64], at_least: int = 1) -> dict[int, list[int]]:
        """The tokens that must come next in ``slots`` [rows]; the matchers have taken them.

        Args:
            at_least: fewer are not worth it, and left to be sampled.
        """
        if not self._by_slot or not self._jump_forward:
            return {}
        all_forced = {
            slot: self._take_forced(entry, at_least)
            for slot in slots.tolist()
            if (entry := self._by_slot.get(slot)) is not None and entry.may_jump
        }
        return {slot: forced for slot, forced in all_forced.items() if forced}

    def sample_next(self, slot: int, token: int) -> None:
        """Let the next mask of a slot allow only this token, which :meth:`take_forced` has taken."""
        self._by_slot[slot].next_token = token

    def _take_forced(self, entry: _SlotMatcher, at_least: int) -> list[int]:
        if entry.begin_after or entry.failed:
            return []
        try:
            tokens = entry.matcher.forced_tokens()
            if len(tokens) + 1 < at_least:  # an end token may follow
                return []
            self._take(entry, tokens)
            ended = entry.matcher.is_terminated()
        except GrammarExhausted:
            return []  # the next mask will fail too, and say so
        return [*tokens, self._eos_token_ids[0]] if ended else tokens

    def _take(self, entry: _SlotMatcher, tokens: list[int]) -> None:
        if entry.failed or not tokens:
            return
        for position, token in enumerate(tokens):
            if not entry.begin_after:
                self._advance(entry, tokens[position:])
                return
            entry.tail = [*entry.tail, token][-len(entry.begin_after) :]
            if entry.tail == entry.begin_after:
                entry.begin_after, entry.tail = [], []

    def _advance(self, entry: _SlotMatcher, tokens: list[int]) -> None:
        if entry.forbidden is not None:
            entry.forbidden.advance(tokens)
        if tokens[-1] in self._eos_token_ids:  # the answer is over
            tokens = tokens[:-1]
        try:
            entry.failed = entry.matcher.advance(tokens) < len(tokens)
        except GrammarExhausted as error:
            log.warning("Matcher failed: %s", error)
            entry.failed = True


def _is_masked(entry: _SlotMatcher) -> bool:
    """Whether its matcher fills the mask of the next token."""
    return not entry.begin_after and not entry.failed and entry.next_token is None
