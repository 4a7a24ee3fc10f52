"""Compiles a regular expression to a finite-state machine over tokens, and matches answers against it by
one table lookup per token.

outlines-core builds the machine. Its masks are the cheapest, but its index is known to lose tokens
(after ``1``, ``1(a[0-9]+)?`` forbids ``a``), and it reads some syntax differently. So every state
of the machine is also reached with llguidance and must allow the same tokens there. A machine that
differs in any state is not used.
"""

import dataclasses
import functools
import os
import signal
import sys
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixrt.constrained.backends import llguidance
from radixrt.constrained.backends.llguidance import LlguidanceMatcher
from radixrt.constrained.bitmask import BitmaskRow, single_token
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


MAX_STATES = 256
MAX_EDGES = 1 << 18
MAX_CHECKED_EDGES = 2048
"""Number of edges, spread over all, after which the masks are compared once more."""
BUDGET_S = 1.0
MAX_PATTERN_CHARS = 4096


def compile_regex(pattern: str, exact: Grammar, facts: TokenizerFacts) -> Grammar | None:
    """The machine for a pattern that llguidance has compiled to ``exact``; None if there is none,
    it is too large, takes too long, or is not equal."""
    if len(pattern) > MAX_PATTERN_CHARS or sys.platform == "win32":
        return None
    # Before the fork, so that both are made once:
    _vocabulary(facts)
    facts.tokenizer  # noqa: B018
    source = _within_budget(lambda: _build(pattern, exact, facts))
    return Grammar.compiled("fsm", source) if source else None


@functools.lru_cache(maxsize=4)
def _vocabulary(facts: TokenizerFacts) -> Any:
    import outlines_core  # here: the worker needs none of it

    ids: dict[bytes, list[int]] = {}
    for token_id, token in enumerate(facts.tokens):
        if token and token_id not in facts.special_ids:
            ids.setdefault(token, []).append(token_id)
    return outlines_core.Vocabulary(facts.eos_token_ids[0], ids)


def _within_budget(build: Any) -> bytes:
    """The result of ``build``, computed in a child process; b"" if it took too long and was killed.

    outlines-core can't be interrupted, only killed with its process.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, BUDGET_S)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with os.fdopen(write_end, "wb") as pipe:
                pipe.write(build())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        source = pipe.read()
    _, status = os.waitpid(child, 0)
    return source if status == 0 else b""


def _build(pattern: str, exact: Grammar, facts: TokenizerFacts) -> bytes:
    """b"" if there is no equal machine within the bounds."""
    import outlines_core

    try:
        index = outlines_core.Index(pattern, _vocabulary(facts))
    except ValueError:
        return b""
    table = _table_of(index, facts)
    if table is None or not _is_equal(table, exact, facts):
        return b""
    return table.pack()


def _table_of(index: Any, facts: TokenizerFacts) -> Table | None:
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    initial, finals = index.get_initial_state(), index.get_final_states()
    ends = set(facts.eos_token_ids)
    if len(transitions) > MAX_STATES or sum(map(len, transitions.values())) > MAX_EDGES:
        return None
    states = {initial} | set(transitions) | set(finals)
    for targets in transitions.values():
        states |= {state for token, state in targets.items() if token not in ends}
    number = {state: i for i, state in enumerate(sorted(states))}
    offsets, tokens, following = [0], [], []
    for state in sorted(states):
        edges = sorted((t, s) for t, s in transitions.get(state, {}).items() if t not in ends)
        tokens += [token for token, _ in edges]
        following += [number[target] for _, target in edges]
        offsets.append(len(tokens))
    return Table(
        facts.vocab_size,
        number[initial],
        _int32(offsets),
        _int32(tokens),
        _int32(following),
        np.full(len(states), NOT_FORCED, dtype=np.int32),
        _int32([state in finals for state in sorted(states)]),
    )


def _int32(values: list[Any]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def _is_equal(table: Table, exact: Grammar, facts: TokenizerFacts) -> bool:
    """Walk machine and matcher side by side: to every state, then over a spread of all edges.

    Fills ``table.forced`` on the way.
    """
    reached: dict[int, LlguidanceMatcher] = {
        table.initial: llguidance.matcher_for_checks(exact, facts)
    }
    waiting = [table.initial]
    while waiting:
        state = waiting.pop()
        matcher = reached[state]
        if not _agrees(table, state, matcher, facts, decide_forced=True):
            return False
        for token, target in _edges(table, state):
            if target not in reached:
                reached[target] = _after(matcher, token)
                waiting.append(target)
    step = max(1, len(table.tokens) // MAX_CHECKED_EDGES)
    edges = [(state, *edge) for state in reached for edge in _edges(table, state)]
    return all(
        _agrees(table, target, _after(reached[state], token), facts, decide_forced=False)
        for state, token, target in edges[::step]
    )


def _edges(table: Table, state: int) -> list[tuple[int, int]]:
    span = slice(int(table.offsets[state]), int(table.offsets[state + 1]))
    return list(zip(table.tokens[span].tolist(), table.targets[span].tolist(), strict=True))


def _after(matcher: LlguidanceMatcher, token: int) -> LlguidanceMatcher:
    following = matcher.fork()
    if following.advance([token]) != 1:
        raise ValueError("a token that the machine allows is not allowed")
    return following


def _agrees(
    table: Table,
    state: int,
    matcher: LlguidanceMatcher,
    facts: TokenizerFacts,
    *,
    decide_forced: bool,
) -> bool:
    """Whether the machine allows exactly the tokens in this state that the matcher takes.

    Where the next bytes are certain, the matcher's mask holds only one of the tokens that it would
    take.
    """
    tokens = table.tokens[table.offsets[state] : table.offsets[state + 1]]
    row = np.zeros_like(facts.eos_mask)
    matcher.fill_mask(row)
    mask = np.unpackbits(row.view(np.uint8), bitorder="little").astype(np.bool_)
    if mask[list(facts.eos_token_ids)].any() != bool(table.accepting[state]):
        return False
    mask[list(facts.eos_token_ids)] = False
    allowed = np.zeros_like(mask)
    allowed[tokens] = True
    only = single_token(row)
    if only is None or only in facts.eos_token_ids:
        return bool((mask == allowed).all())
    if decide_forced:
        table.forced[state] = only
    return bool(allowed[only]) and all(
        (matcher.fork().advance([token_id]) == 1) == bool(allowed[token_id])
        for token_id in _compatible(matcher.forced_bytes(), only, facts) | set(tokens.tolist())
    )


def _compatible(forced: bytes, only: int, facts: TokenizerFacts) -> set[int]:
    """All ordinary tokens that agree with the forced bytes over their common length; no other token
    is possible here."""
    forced = forced or facts.tokens[only][:1]
    return {
        token_id
        for token_id in _by_first_byte(facts)[forced[0]]
        if forced.startswith(facts.tokens[token_id]) or facts.tokens[token_id].startswith(forced)
    }


@functools.lru_cache(maxsize=4)
def _by_first_byte(facts: TokenizerFacts) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for token_id, token in enumerate(facts.tokens):
        if token and token_id not in facts.special_ids:
            found.setdefault(token[0], []).append(token_id)
    return found
