"""How does a finite-state machine over tokens hold an answer? A table lookup a token, and no library in the worker.

Compiling one, with the proof that it is right, is the business of fsm_compiler.py.
"""

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import BitmaskRow
from radixrt.constrained.tokenizer_facts import TokenizerFacts

_HEAD = struct.Struct("<4sIIII")
"""Magic, vocab_size, number of states, number of edges, initial state."""
_MAGIC = b"FSM1"
NOT_FORCED = -1


class Table:
    """The machine; matchers share it.

    Attributes:
        initial: state before the first token.
        offsets: [num_states + 1]; the edges of state s are ``offsets[s]:offsets[s + 1]``.
        tokens: [num_edges]; of each state in ascending order.
        targets: [num_edges]; the state after the token.
        forced: [num_states]; where the next bytes are certain, the one token that the mask holds
            (others that spell the same bytes are taken all the same), else NOT_FORCED.
        accepting: [num_states]; 1 where the answer may end.
    """

    def __init__(
        self,
        vocab_size: int,
        initial: int,
        offsets: NDArray[np.int32],
        tokens: NDArray[np.int32],
        targets: NDArray[np.int32],
        forced: NDArray[np.int32],
        accepting: NDArray[np.int32],
    ) -> None:
        self.vocab_size = vocab_size
        self.initial = initial
        self.offsets = offsets
        self.tokens = tokens
        self.targets = targets
        self.forced = forced
        self.accepting = accepting
        self._rows: dict[int, BitmaskRow] = {}

    def pack(self) -> bytes:
        head = _HEAD.pack(_MAGIC, self.vocab_size, len(self.forced), len(self.tokens), self.initial)
        arrays = (self.offsets, self.tokens, self.targets, self.forced, self.accepting)
        return head + b"".join(np.asarray(array, dtype="<i4").tobytes() for array in arrays)

    @staticmethod
    def unpack(source: bytes) -> "Table":
        """Raises:
        GrammarExhausted: it is no table.
        """
        if len(source) < _HEAD.size:
            raise GrammarExhausted("The grammar is no finite-state machine.")
        magic, vocab_size, num_states, num_edges, initial = _HEAD.unpack_from(source)
        lengths = [num_states + 1, num_edges, num_edges, num_states, num_states]
        if magic != _MAGIC or len(source) != _HEAD.size + 4 * sum(lengths):
            raise GrammarExhausted("The grammar is no finite-state machine.")
        values = np.frombuffer(source, dtype="<i4", offset=_HEAD.size)
        offsets, tokens, targets, forced, accepting = np.split(values, np.cumsum(lengths)[:-1])
        return Table(vocab_size, initial, offsets, tokens, targets, forced, accepting)

    def next_state(self, state: int, token_id: int) -> int | None:
        """The state after a token; None if it is not allowed."""
        begin, end = int(self.offsets[state]), int(self.offsets[state + 1])
        index = begin + int(np.searchsorted(self.tokens[begin:end], token_id))
        if index == end or self.tokens[index] != token_id:
            return None
        return int(self.targets[index])

    def has_edges(self, state: int) -> bool:
        return bool(self.offsets[state] < self.offsets[state + 1])

    def row(self, state: int, facts: TokenizerFacts) -> BitmaskRow:
        """The mask in a state; made when it is first asked for."""
        row = self._rows.get(state)
        if row is None:
            allowed = np.zeros(32 * len(facts.eos_mask), dtype=np.bool_)
            if self.forced[state] != NOT_FORCED:
                allowed[self.forced[state]] = True
            else:
                allowed[self.tokens[self.offsets[state] : self.offsets[state + 1]]] = True
            row = np.packbits(allowed, bitorder="little").view(np.int32)
            if self.accepting[state]:
                row |= facts.eos_mask
            self._rows[state] = row
        return row


def load(grammar: Grammar, facts: TokenizerFacts) -> "FsmMatcher":
    """Raises:
    GrammarExhausted: the grammar was compiled for another tokenizer.
    """
    table = Table.unpack(grammar.source)
    if table.vocab_size != facts.vocab_size:
        raise GrammarExhausted("The grammar was compiled for another tokenizer.")
    return FsmMatcher(table, facts, [table.initial])


class FsmMatcher:
    """A :class:`~radixrt.constrained.matcher.Matcher` that walks a :class:`Table`."""

    __slots__ = ("_ended", "_states", "_table", "facts")

    def __init__(
        self, table: Table, facts: TokenizerFacts, states: list[int], ended: bool = False
    ) -> None:
        self.facts = facts
        self._table = table
        self._states = states
        """The state after each token; first the initial one."""
        self._ended = ended

    def advance(self, token_ids: Sequence[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if not self._take(token_id):
                return index
        return len(token_ids)

    def _take(self, token_id: int) -> bool:
        if self._ended:
            return False
        state = self._states[-1]
        if token_id in self.facts.eos_token_ids:
            self._ended = bool(self._table.accepting[state])
            return self._ended
        following = self._table.next_state(state, token_id)
        if following is None:
            return False
        self._states.append(following)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > len(self._states) - 1 + self._ended:
            raise ValueError(
                f"can't give back {num_tokens} tokens of {len(self._states) - 1 + self._ended}"
            )
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens:
            del self._states[-num_tokens:]

    def fill_mask(self, row: BitmaskRow) -> None:
        row[:] = (
            self.facts.eos_mask if self._ended else self._table.row(self._states[-1], self.facts)
        )

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        state: int | None = None if self._ended else self._states[-1]
        while state is not None and self._table.forced[state] != NOT_FORCED:
            token_id = int(self._table.forced[state])
            forced.append(token_id)
            state = self._table.next_state(state, token_id)
        return forced

    def is_terminated(self) -> bool:
        return self._ended or not self._table.has_edges(self._states[-1])

    def fork(self) -> "FsmMatcher":
        return FsmMatcher(self._table, self.facts, self._states.copy(), self._ended)
