"""Which grammars does the worker hold, and which sequences wait for one?

The scheduler decides, the worker obeys: a grammar is loaded when the first sequence asks for it, and
dropped, least recently used first, when no sequence uses it and the shelf is full. Loading goes on beside
the steps; a sequence that waits for its grammar is not in the queue, so it holds up nobody.
"""

from dataclasses import dataclass, field

from radixrt.messages.sequences import Constraint
from radixrt.messages.steps import DropGrammar, GrammarLoaded, GrammarUse, LoadGrammar
from radixrt.scheduler.sequence import Sequence

MAX_IDLE_BYTES = 64 << 20
"""Sources of grammars that nobody uses at the moment and that are kept for the next who asks."""

MAX_IDLE_GRAMMARS = 256


@dataclass(eq=False, slots=True)
class _Entry:
    key: bytes
    grammar_id: int
    num_bytes: int
    ranks_to_load: int
    num_users: int = 0
    waiting: dict[int, Sequence] = field(default_factory=dict)


class GrammarShelf:
    """Counts the users of every grammar; :meth:`take_orders` is what the workers have to be told."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._by_key: dict[bytes, _Entry] = {}
        self._by_id: dict[int, _Entry] = {}
        self._idle: dict[int, _Entry] = {}
        """Loaded and without users, least recently used first."""
        self._idle_bytes = 0
        self._orders: list[LoadGrammar | DropGrammar] = []
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        """Sequences whose grammar is being loaded."""
        return sum(len(entry.waiting) for entry in self._by_id.values())

    def take_orders(self) -> list[LoadGrammar | DropGrammar]:
        """Messages for every worker, in this order, before any plan made from now on."""
        orders, self._orders = self._orders, []
        return orders

    def use(self, constraint: Constraint, num_output: int) -> GrammarUse:
        """Reserve a grammar for one sequence, and have it loaded if need be."""
        key = constraint.grammar.key
        entry = self._by_key.get(key)
        if entry is None:
            entry = self._load(key, constraint)
        if self._idle.pop(entry.grammar_id, None) is not None:
            self._idle_bytes -= entry.num_bytes
        entry.num_users += 1
        return GrammarUse(entry.grammar_id, constraint.begin_after, constraint.excluded, num_output)

    def _load(self, key: bytes, constraint: Constraint) -> _Entry:
        entry = _Entry(key, self._next_id, len(constraint.grammar.source), self._num_ranks)
        self._next_id += 1
        self._by_key[key] = self._by_id[entry.grammar_id] = entry
        self._orders.append(LoadGrammar(grammar_id=entry.grammar_id, grammar=constraint.grammar))
        return entry

    def is_loading(self, use: GrammarUse) -> bool:
        return self._by_id[use.grammar_id].ranks_to_load > 0

    def wait(self, sequence: Sequence) -> None:
        """Keep a sequence until its grammar is loaded."""
        assert sequence.grammar is not None
        self._by_id[sequence.grammar.grammar_id].waiting[sequence.seq_id] = sequence

    def loaded(self, message: GrammarLoaded) -> list[Sequence]:
        """One rank has answered. Returns the sequences that have waited: all may go on, or, with
        ``message.error``, none. They stay users until released."""
        entry = self._by_id.get(message.grammar_id)
        if entry is None:
            return []  # another rank has failed at it
        if message.error is not None:
            waiting = entry.waiting
            entry.waiting = {}
            self._forget(entry)
            return list(waiting.values())
        entry.ranks_to_load -= 1
        if entry.ranks_to_load:
            return []
        waiting, entry.waiting = entry.waiting, {}
        if not entry.num_users:
            self._put_aside(entry)
        return list(waiting.values())

    def release(self, sequence: Sequence) -> bool:
        """A sequence needs its grammar no more. True if it was waiting for it."""
        if sequence.grammar is None:
            return False
        entry = self._by_id.get(sequence.grammar.grammar_id)
        if entry is None:
            return False
        entry.num_users -= 1
        if not entry.num_users and not entry.ranks_to_load:
            self._put_aside(entry)
        return entry.waiting.pop(sequence.seq_id, None) is not None

    def _put_aside(self, entry: _Entry) -> None:
        self._idle[entry.grammar_id] = entry
        self._idle_bytes += entry.num_bytes
        while self._idle_bytes > MAX_IDLE_BYTES or len(self._idle) > MAX_IDLE_GRAMMARS:
            oldest = next(iter(self._idle.values()))
            del self._idle[oldest.grammar_id]
            self._idle_bytes -= oldest.num_bytes
            self._forget(oldest)

    def _forget(self, entry: _Entry) -> None:
        del self._by_key[entry.key], self._by_id[entry.grammar_id]
        self._orders.append(DropGrammar(entry.grammar_id))
