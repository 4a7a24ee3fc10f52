"""Loads a compiled grammar as a matcher."""

from radixrt.constrained.backends import fsm, llguidance
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts


def load_grammar(grammar: Grammar, facts: TokenizerFacts) -> Matcher:
    """A matcher before the first token; fork it for each sequence. Raises GrammarExhausted if the
    grammar was compiled for another tokenizer, or by another version of its library."""
    if grammar.backend == "fsm":
        return fsm.load(grammar, facts)
    return llguidance.load(grammar, facts)
