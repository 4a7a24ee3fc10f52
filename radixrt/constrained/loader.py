"""Loads a compiled grammar as a matcher, and fills the mask rows of a whole batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixrt.constrained.backends import fsm, llguidance
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts


def load_grammar(grammar: Grammar, facts: TokenizerFacts) -> Matcher:
    """A matcher before the first token; fork it for each sequence.

    Raises:
        GrammarExhausted: the grammar was compiled for another tokenizer, or by another version of its library.
    """
    if grammar.backend == "xgrammar":
        from radixrt.constrained.backends import xgrammar  # here, since it takes seconds

        return xgrammar.load(grammar, facts)
    if grammar.backend == "fsm":
        return fsm.load(grammar, facts)
    return llguidance.load(grammar, facts)


def fill_masks(matchers: Sequence[Matcher | None], bitmask: NDArray[np.int32]) -> None:
    """Fill row i of ``bitmask`` (int32 [at least len(matchers), bitmask_words], C-contiguous) for matcher i;
    rows of None are left alone.

    Raises:
        GrammarExhausted: a matcher can't go on. Other rows may not be filled then; ask each matcher alone.
    """
    native = []
    for index, matcher in enumerate(matchers):
        if isinstance(matcher, llguidance.LlguidanceMatcher):
            native.append((matcher, index))
        elif matcher is not None:
            matcher.fill_mask(bitmask[index])
    if native:
        llguidance.fill_masks(native, bitmask)
