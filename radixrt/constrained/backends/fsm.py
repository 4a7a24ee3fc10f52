"""Matcher of a finite-state machine over tokens: one table lookup per token, without any library in
the worker.

:mod:`radixrt.constrained.backends.fsm_compiler` builds the machine and proves it equal to
llguidance's grammar.
"""

import dataclasses

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.errors import GrammarExhausted
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts

_DECODER = msgspec.msgpack.Decoder(tuple[int, int, bytes, bytes, bytes, bytes, bytes])
"""vocab_size and initial state, then the five arrays of a table as little-endian int32."""
NOT_FORCED = -1


@dataclasses.dataclass(eq=False)
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

    vocab_size: int
    initial: int
    offsets: NDArray[np.int32]
    tokens: NDArray[np.int32]
    targets: NDArray[np.int32]
    forced: NDArray[np.int32]
    accepting: NDArray[np.int32]
    _rows: dict[int, BitmaskRow] = dataclasses.field(default_factory=dict, init=False)

    def pack(self) -> bytes:
        arrays = (self.offsets, self.tokens, self.targets, self.forced, self.accepting)
        packed = [np.asarray(array, dtype="<i4").tobytes() for array in arrays]
        return msgspec.msgpack.encode((self.vocab_size, self.initial, *packed))

    @staticmethod
    def unpack(source: bytes) -> "Table":
        """Raises GrammarExhausted if it is no table."""
        try:
            vocab_size, initial, *arrays = _DECODER.decode(source)
        except msgspec.DecodeError as error:
            raise GrammarExhausted("The grammar is no finite-state machine.") from error
        return Table(vocab_size, initial, *(np.frombuffer(each, dtype="<i4") for each in arrays))

    def next_state(self, state: int, token_id: int) -> int | None:
        """The state after a token; None if it is not allowed."""
        begin, end = int(self.offsets[state]), int(self.offsets[state + 1])
        index = begin + int(np.searchsorted(self.tokens[begin:end], token_id))
        if index == end or self.tokens[index] != token_id:
            return None
        return int(self.targets[index])

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
    """Raises GrammarExhausted if the grammar was compiled for another tokenizer."""
    table = Table.unpack(grammar.source)
    if table.vocab_size != facts.vocab_size:
        raise GrammarExhausted("The grammar was compiled for another tokenizer.")
    return FsmMatcher(table, facts, [table.initial])


class FsmMatcher(Matcher):
    """Walks a :class:`Table`."""

    __slots__ = ("_states", "_table")

    def __init__(self, table: Table, facts: TokenizerFacts, states: list[int]) -> None:
        super().__init__(facts)
        self._table = table
        self._states = states
        """The state after each token; first the initial one."""

    def _take(self, token_ids: list[int]) -> int:
        for index, token_id in enumerate(token_ids):
            following = self._table.next_state(self._states[-1], token_id)
            if following is None:
                return index
            self._states.append(following)
        return len(token_ids)

    def _give_back(self, num_tokens: int) -> None:
        del self._states[-num_tokens:]

    def _fill(self, row: BitmaskRow) -> None:
        row[:] = self._table.row(self._states[-1], self.facts)

    def _forced(self) -> list[int]:
        forced: list[int] = []
        state: int | None = self._states[-1]
        while state is not None and self._table.forced[state] != NOT_FORCED:
            forced.append(int(self._table.forced[state]))
            state = self._table.next_state(state, forced[-1])
        return forced

    def _may_end(self) -> bool:
        return bool(self._table.accepting[self._states[-1]])

    def _copy(self) -> "FsmMatcher":
        return FsmMatcher(self._table, self.facts, self._states.copy())
