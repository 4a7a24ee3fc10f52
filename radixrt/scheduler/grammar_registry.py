"""Keeps the sequences whose grammar the workers are still loading, and refuses those whose grammar
is missing.

The tokenizer process owns the life of a grammar: it sends ``LoadGrammar`` before the first sequence
that names the key and ``DropGrammar`` when no answer under way does. A sequence that waits for its
grammar is not in the queue, so it delays no other.

A key is loaded at most once at a time: a drop that arrives while ranks are still loading is passed
on when all have answered, and a second ``LoadGrammar`` before that takes the drop back. So every
``GrammarLoaded`` belongs to the one load that is under way for its key.
"""

from dataclasses import dataclass, field

from radixrt.messages.grammars import DropGrammar, GrammarKey, GrammarLoaded, LoadGrammar
from radixrt.messages.sequences import SequenceRefused
from radixrt.scheduler.sequence import Sequence


@dataclass(eq=False, slots=True)
class _Entry:
    ranks_to_load: int
    error: str | None = None
    """The error of the first rank that could not load it."""
    is_dropped: bool = False
    """The tokenizer process has dropped it; known to the ranks when all have answered."""
    waiting: dict[int, Sequence] = field(default_factory=dict)


class GrammarRegistry:
    """The grammars that the tokenizer process has sent; :meth:`take_orders` returns the messages
    for the workers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._entries: dict[GrammarKey, _Entry] = {}
        self._orders: list[LoadGrammar | DropGrammar] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        """Sequences whose grammar is being loaded."""
        return sum(len(entry.waiting) for entry in self._entries.values())

    def take_orders(self) -> list[LoadGrammar | DropGrammar]:
        """Messages for every worker, in this order, before any plan made from now on."""
        orders, self._orders = self._orders, []
        return orders

    # ------------------------------------------------------------ from the tokenizer process and
    # the workers

    def load(self, message: LoadGrammar) -> None:
        """Have a grammar loaded; sequences may name it from now on."""
        key = message.grammar.key
        if key in self._entries:
            self._entries[key].is_dropped = False
            return
        self._entries[key] = _Entry(self._num_ranks)
        self._orders.append(message)

    def drop(self, message: DropGrammar) -> None:
        """Forget a grammar that no sequence names any more. An unknown key is ignored."""
        entry = self._entries.get(message.key)
        if entry is None:
            return
        entry.is_dropped = True
        if not entry.ranks_to_load:
            self._forget(message.key)

    def drop_all(self) -> None:
        """Forget all grammars: the tokenizer process that has sent them is gone, and no sequence
        names one any more."""
        for key in list(self._entries):
            self.drop(DropGrammar(key))

    def loaded(self, message: GrammarLoaded) -> list[Sequence]:
        """Note the answer of one rank. Returns the sequences that have waited, when all ranks have
        answered."""
        entry = self._entries[message.key]
        entry.ranks_to_load -= 1
        entry.error = entry.error or message.error
        if entry.ranks_to_load:
            return []
        if entry.is_dropped:
            self._forget(message.key)
        waiting, entry.waiting = entry.waiting, {}
        return list(waiting.values())

    def _forget(self, key: GrammarKey) -> None:
        del self._entries[key]
        self._orders.append(DropGrammar(key))

    # ------------------------------------------------------------ for sequences

    def refusal(self, seq_id: int, key: GrammarKey) -> SequenceRefused | None:
        """Why a sequence can't use a grammar; None if it is loaded or being loaded."""
        entry = self._entries.get(key)
        if entry is None:
            reason = (
                "The grammar of this request did not reach the scheduler; send the request again."
            )
            return SequenceRefused(seq_id, reason, 500, grammar_lost=True)
        if entry.error is not None:
            return SequenceRefused(seq_id, entry.error, 400, grammar_lost=True)
        return None

    def is_loading(self, key: GrammarKey) -> bool:
        return self._entries[key].ranks_to_load > 0

    def wait(self, sequence: Sequence) -> None:
        """Keep a sequence until its grammar is loaded."""
        assert sequence.grammar is not None
        self._entries[sequence.grammar.key].waiting[sequence.seq_id] = sequence

    def stop_waiting(self, sequence: Sequence) -> bool:
        """Take back :meth:`wait`. True if the sequence was waiting."""
        if sequence.grammar is None or sequence.grammar.key not in self._entries:
            return False
        waiting = self._entries[sequence.grammar.key].waiting
        return waiting.pop(sequence.seq_id, None) is not None
