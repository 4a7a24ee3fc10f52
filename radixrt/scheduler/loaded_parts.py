"""The parts that sequences name by a key and workers load once, grammars and images: keeps the
sequences whose parts are still being loaded, and refuses those whose parts are missing.

The tokenizer process owns the life of a grammar: it sends ``LoadGrammar`` before the first sequence
that names the key and ``DropGrammar`` when no answer under way does. A sequence that waits for its
grammar is not in the queue, so it delays no other.

A key is loaded at most once at a time: a drop that arrives while ranks are still loading is passed
on when all have answered, and a second ``LoadGrammar`` before that takes the drop back. So every
``GrammarLoaded`` belongs to the one load that is under way for its key. Images go the same way:
loading one is to run the tower on it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from msgspec.structs import replace

from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.messages.images import DropImage, HurryImage, ImageLoaded, LoadImage
from radixrt.messages.links import WorkerOrder
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


Load = TypeVar("Load", LoadGrammar, LoadImage)
Drop = TypeVar("Drop", DropGrammar, DropImage)


class Registry(ABC, Generic[Load, Drop]):
    """What the tokenizer process has sent and sequences name by its key; :meth:`take_orders`
    returns the messages for the workers."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._entries: dict[bytes, _Entry] = {}
        self._orders: list[WorkerOrder] = []
        self.num_loaded = 0
        """Orders to load one."""

    @abstractmethod
    def _drop_order(self, key: bytes) -> Drop:
        """The message that drops a key."""

    @abstractmethod
    def _keys_of(self, sequence: Sequence) -> Many[bytes]:
        """The keys that a sequence names."""

    @abstractmethod
    def refusal(self, seq_id: int, key: bytes) -> SequenceRefused | None:
        """Why a sequence can't use a key; None if it is loaded or being loaded."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait until theirs is loaded."""
        return sum(len(entry.waiting) for entry in self._entries.values())

    def take_orders(self) -> list[WorkerOrder]:
        """Messages for every worker, in this order, before any plan made from now on."""
        orders, self._orders = self._orders, []
        return orders

    # ------------------------------------------------------------ from the tokenizer process and
    # the workers

    def load(self, message: Load) -> None:
        """Have a key loaded; sequences may name it from now on."""
        key = message.key
        if key in self._entries:
            self._entries[key].is_dropped = False
            return
        self.num_loaded += 1
        self._entries[key] = _Entry(self._num_ranks)
        self._orders.append(message)

    def drop(self, message: Drop) -> None:
        """Forget a key that no sequence names any more. An unknown one is ignored."""
        entry = self._entries.get(message.key)
        if entry is None:
            return
        entry.is_dropped = True
        if not entry.ranks_to_load:
            self._forget(message.key)

    def drop_all(self) -> None:
        """Forget all: the tokenizer process that has sent them is gone, and no sequence names one
        any more."""
        for key in list(self._entries):
            self.drop(self._drop_order(key))

    def loaded(self, message: GrammarLoaded | ImageLoaded) -> list[Sequence]:
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

    def _forget(self, key: bytes) -> None:
        del self._entries[key]
        self._orders.append(self._drop_order(key))

    # ------------------------------------------------------------ for sequences

    def refuse(self, sequence: Sequence) -> SequenceRefused | None:
        """Why a sequence can't be queued; None if all that it names is loaded or being loaded."""
        refusals = (self.refusal(sequence.seq_id, key) for key in self._keys_of(sequence))
        return next((refusal for refusal in refusals if refusal is not None), None)

    def keep_waiting(self, sequence: Sequence) -> bool:
        """Keep a sequence until what it names is loaded, one key after the other. False if all is
        there."""
        for key in self._keys_of(sequence):
            if self._entries[key].ranks_to_load:
                self._entries[key].waiting[sequence.seq_id] = sequence
                return True
        return False

    def stop_waiting(self, sequence: Sequence) -> bool:
        """Take back :meth:`keep_waiting`. True if the sequence was waiting."""
        entries = (self._entries.get(key) for key in self._keys_of(sequence))
        kept = [entry.waiting.pop(sequence.seq_id, None) for entry in entries if entry]
        return any(one is not None for one in kept)


class GrammarRegistry(Registry[LoadGrammar, DropGrammar]):
    """The compiled grammars."""

    def _drop_order(self, key: bytes) -> DropGrammar:
        return DropGrammar(key)

    def _keys_of(self, sequence: Sequence) -> Many[bytes]:
        return () if sequence.grammar is None else (sequence.grammar.key,)

    def refusal(self, seq_id: int, key: bytes) -> SequenceRefused | None:
        entry = self._entries.get(key)
        if entry is None:
            reason = (
                "The grammar of this request did not reach the scheduler; send the request again."
            )
            return SequenceRefused(seq_id, reason, 500, grammar_lost=True)
        if entry.error is not None:
            return SequenceRefused(seq_id, entry.error, 400, grammar_lost=True)
        return None


class ImageRegistry(Registry[LoadImage, DropImage]):
    """The images of prompts; removes the files of large ones when they have been read.

    A tokenizer process takes the files that it has sent with it when it dies, before ranks have
    read them. The next one sends the images of its requests again, so an image whose file is gone
    is loaded from the file that came last.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._files: dict[bytes, Path] = {}
        self._sent_again: dict[bytes, LoadImage] = {}
        """The last message of each image that came while ranks were loading it from a file."""

    def load(self, message: LoadImage) -> None:
        key = message.key
        entry = self._entries.get(key)
        super().load(message)
        if entry is None:
            self._own_file(message)
        elif not entry.ranks_to_load:
            _remove_file(message)
        else:
            if not message.idle:  # the order may be one for idle times
                self._orders.append(HurryImage(key))
            unused: LoadImage | None = message
            if key in self._files:
                unused, self._sent_again[key] = self._sent_again.get(key), message
            _remove_file(unused)

    def hurry(self, message: HurryImage) -> None:
        """An answer waits for an image that is wanted for idle times."""
        key = message.key
        entry = self._entries.get(key)
        if entry is not None and entry.ranks_to_load:
            self._orders.append(message)
            if key in self._sent_again:
                self._sent_again[key] = replace(self._sent_again[key], idle="")

    def loaded(self, message: GrammarLoaded | ImageLoaded) -> list[Sequence]:
        key = message.key
        entry = self._entries[key]
        if entry.ranks_to_load > 1:
            return super().loaded(message)
        if key in self._files:
            self._files.pop(key).unlink(missing_ok=True)
        again = self._sent_again.pop(key, None)
        if again is not None and (entry.error or message.error) and not entry.is_dropped:
            self._load_again(entry, again)
            return []
        _remove_file(again)
        return super().loaded(message)

    def _load_again(self, entry: _Entry, message: LoadImage) -> None:
        """Load an image from another file; its sequences go on waiting."""
        self.num_loaded += 1
        entry.ranks_to_load, entry.error = self._num_ranks, None
        self._own_file(message)
        self._orders += (self._drop_order(message.key), message)

    def _own_file(self, message: LoadImage) -> None:
        if message.file:
            self._files[message.key] = Path(message.file)

    def _drop_order(self, key: bytes) -> DropImage:
        return DropImage(key)

    def _keys_of(self, sequence: Sequence) -> Many[bytes]:
        return [run.image for run in sequence.images]

    def refusal(self, seq_id: int, key: bytes) -> SequenceRefused | None:
        entry = self._entries.get(key)
        if entry is None:
            reason = "An image of this request did not reach the scheduler; send the request again."
            return SequenceRefused(seq_id, reason, 500, grammar_lost=True)
        if entry.error is not None:
            return SequenceRefused(seq_id, entry.error, 500, grammar_lost=True)
        return None


def _remove_file(message: LoadImage | None) -> None:
    if message is not None and message.file:
        Path(message.file).unlink(missing_ok=True)
