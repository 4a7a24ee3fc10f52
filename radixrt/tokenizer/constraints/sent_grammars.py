"""The compiled grammars that a scheduler has."""

from collections.abc import Callable

import msgspec

from radixrt.constrained.grammar import Grammar
from radixrt.messages.grammars import DropGrammar, LoadGrammar
from radixrt.tokenizer.sent_parts import SentParts

MAX_IDLE_BYTES = 256 << 20
"""Memory of unused grammars that stay loaded for the next requests."""

MAX_IDLE_GRAMMARS = 256


class SentGrammars(SentParts):
    """See ``SentParts``."""

    def __init__(
        self,
        to_scheduler: Callable[[msgspec.Struct], None],
        *,
        max_idle_bytes: int = MAX_IDLE_BYTES,
        max_idle_grammars: int = MAX_IDLE_GRAMMARS,
    ) -> None:
        super().__init__(
            to_scheduler, DropGrammar, max_idle_bytes=max_idle_bytes, max_idle=max_idle_grammars
        )

    def use(self, grammar: Grammar) -> None:
        """``use_part`` of a grammar."""
        self.use_part(grammar.key, grammar.loaded_bytes, lambda: LoadGrammar(grammar))
