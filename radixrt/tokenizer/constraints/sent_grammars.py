"""Sends each compiled grammar to the scheduler once, and drops it there when it has been unused for
longest.

The tokenizer process owns the life of a grammar because it knows both its source and all answers
that use it. It counts users by key, so that neither scheduler nor workers have to, and no message
has to be awaited: on the one ordered link, ``LoadGrammar`` is ahead of the first sequence that
names the key, and ``DropGrammar`` behind the end or release of the last one. A grammar is therefore
never dropped while a sequence may still be admitted with it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from radixrt.constrained.grammar import Grammar, GrammarKey
from radixrt.messages.grammars import DropGrammar, LoadGrammar

MAX_IDLE_BYTES = 256 << 20
"""Memory of unused grammars that stay loaded for the next requests."""

MAX_IDLE_GRAMMARS = 256


@dataclass(eq=False, slots=True)
class _Sent:
    num_bytes: int
    num_users: int = 0
    is_lost: bool = False
    """The scheduler has refused to use it: it is dropped as soon as it is unused, not kept."""


class SentGrammars:
    """The grammars that the scheduler has. Every :meth:`use` is followed by one :meth:`release`."""

    def __init__(
        self,
        to_scheduler: Callable[[msgspec.Struct], None],
        *,
        max_idle_bytes: int = MAX_IDLE_BYTES,
        max_idle_grammars: int = MAX_IDLE_GRAMMARS,
    ) -> None:
        self._to_scheduler = to_scheduler
        self._max_idle_bytes = max_idle_bytes
        self._max_idle_grammars = max_idle_grammars
        self._sent: dict[GrammarKey, _Sent] = {}
        self._idle: dict[GrammarKey, int] = {}
        """Bytes of those without users, least recently used first."""
        self._idle_bytes = 0

    def use(self, grammar: Grammar) -> None:
        """Count one more answer that uses a grammar; send the grammar if the scheduler does not
        have it.

        Call it before the answer's first sequence is sent.

        Raises:
            FrameTooLargeError: the grammar is too large to be sent.
        """
        sent = self._sent.get(grammar.key)
        if sent is None:
            self._to_scheduler(LoadGrammar(grammar))
            sent = self._sent[grammar.key] = _Sent(grammar.loaded_bytes)
        self._idle_bytes -= self._idle.pop(grammar.key, 0)
        sent.num_users += 1

    def release(self, key: GrammarKey) -> None:
        """Count one answer less. Call it after the scheduler has ended its sequence or was told to
        release it."""
        sent = self._sent[key]
        sent.num_users -= 1
        if sent.num_users:
            return
        if sent.is_lost:
            self._drop(key)
            return
        self._idle[key] = sent.num_bytes
        self._idle_bytes += sent.num_bytes
        while self._idle_bytes > self._max_idle_bytes or len(self._idle) > self._max_idle_grammars:
            oldest = next(iter(self._idle))
            self._idle_bytes -= self._idle.pop(oldest)
            self._drop(oldest)

    def lost(self, key: GrammarKey) -> None:
        """The scheduler can't use a grammar that has users: send it again for requests after the
        present ones."""
        self._sent[key].is_lost = True

    def _drop(self, key: GrammarKey) -> None:
        del self._sent[key]
        self._to_scheduler(DropGrammar(key))
