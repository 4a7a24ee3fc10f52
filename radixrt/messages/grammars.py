"""Messages that bring compiled grammars from the tokenizer process by way of the scheduler to the
workers.

A grammar travels once and is named by its key (:class:`radixrt.constrained.grammar.Grammar`) from
then on. One process owns its life: the tokenizer process sends ``LoadGrammar`` ahead of the first
sequence that names the key, and ``DropGrammar`` when no answer in flight names it. A link keeps the
order of its messages, so the scheduler knows every key that a sequence names, and no other process
has to count users.
"""

import msgspec

from radixrt.constrained.grammar import Grammar
from radixrt.constrained.grammar import GrammarKey as GrammarKey
from radixrt.messages.ids import PackedIds
from radixrt.messages.message import Message


class LoadGrammar(Message, frozen=True):
    """Make a grammar ready for the sequences to come. Every rank answers the scheduler with a
    GrammarLoaded."""

    grammar: Grammar

    @property
    def key(self) -> GrammarKey:
        """The grammar's."""
        return self.grammar.key


class DropGrammar(Message, frozen=True):
    """No sequence to come names this grammar, unless it is loaded again."""

    key: GrammarKey


class GrammarLoaded(Message, frozen=True, kw_only=True):
    """One rank has made a grammar ready, or could not."""

    key: GrammarKey
    error: str | None = None


class GrammarUse(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How one answer is held to a grammar. Travels whole from the tokenizer process to the
    worker."""

    key: GrammarKey
    begin_after: PackedIds = b""
    """The grammar begins behind the first occurrence of this tag in the answer, in any tokens;
    empty: at once. Until then every token is allowed except those that end the answer, and those
    that complete the tag and have more text."""
    excluded: list[PackedIds] = []
    """Token sequences that the answer must not take, each counted from ``excluded_from``."""
    excluded_from: int = 0
    """Number of generated tokens before the excluded sequences begin."""
    opening: PackedIds = b""
    """If given: the grammar begins at once unless the answer begins with this tag, which opens what
    ends with ``begin_after``. The masks allow the tag beside the tokens of the grammar."""
    then_after: PackedIds = b""
    """If given: behind ``begin_after`` other tokens may follow, and the grammar begins behind this
    tag."""
