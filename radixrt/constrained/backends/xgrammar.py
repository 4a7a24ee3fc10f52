"""Compiles audited JSON schemas with xgrammar, and matches answers against them.

Its converter of JSON schemas drops some keywords silently; only schemas that the audit allows are compiled here. Importing this module
takes seconds (xgrammar imports torch and transformers), so it is imported only when such a grammar comes.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import xgrammar

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.bitmask import BitmaskRow, single_token
from radixrt.constrained.errors import CannotCompile, GrammarExhausted
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import MAX_FORCED, Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts

MAX_COMPILED_BYTES = 128 << 20
"""Memory of a grammar in the worker. It grows with the square of the number of rules that begin with one another."""

_MOST_WHITESPACE = 33
"""Characters at each gap of a JSON text, as many as llguidance gets at most."""


@functools.lru_cache(maxsize=4)
def _tokenizer(facts: TokenizerFacts) -> xgrammar.TokenizerInfo:
    """Control tokens have no bytes here: they are never part of text."""
    tokens = [b"" if i in facts.special_ids else token for i, token in enumerate(facts.tokens)]
    return xgrammar.TokenizerInfo(
        tokens,
        xgrammar.VocabType.RAW,
        vocab_size=facts.vocab_size,
        stop_token_ids=list(facts.eos_token_ids),
    )


def compile_json_schema(schema: str, facts: TokenizerFacts, whitespace: WhitespaceName) -> Grammar:
    """Compile a schema of which the audit found that xgrammar enforces it. xgrammar drops keywords that it does not know.

    Raises:
        CannotCompile: xgrammar refuses the schema.
    """
    gaps: dict[str, Any] = (
        {"max_whitespace_cnt": _MOST_WHITESPACE}
        if whitespace == "flexible"
        else {"any_whitespace": False, "separators": (",", ":")}
    )
    return _checked(
        lambda: xgrammar.Grammar.from_json_schema(schema, strict_mode=False, **gaps), facts
    )


def _checked(read: Callable[[], xgrammar.Grammar], facts: TokenizerFacts) -> Grammar:
    """The grammar, if a first token can be found for it.

    Its source is the grammar, not xgrammar's compiled form: that has the masks of the whole vocabulary, 127 MB for a schema of
    67 kB, and takes fifty times as long to write and read as to compile again.
    """
    try:
        grammar = read()
        compiled = _compiled(grammar, facts)
        native = xgrammar.GrammarMatcher(compiled)
    except CannotCompile:
        raise
    except Exception as error:  # xgrammar's errors have no common base
        if "std::bad_alloc" in str(error):
            raise MemoryError from error
        raise CannotCompile(_sentence(str(error))) from error
    row = np.zeros_like(facts.eos_mask)
    XgrammarMatcher(facts, native).fill_mask(row)
    if not row.any():
        raise CannotCompile("Nothing satisfies it, or nothing that this model's tokens can spell.")
    if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
        raise CannotCompile(
            f"Its compiled form has {compiled.memory_size_bytes} bytes; at most {MAX_COMPILED_BYTES} are kept. Simplify it."
        )
    source = grammar.serialize_json().encode()
    return Grammar.compiled("xgrammar", source, compiled.memory_size_bytes)


def _compiled(grammar: xgrammar.Grammar, facts: TokenizerFacts) -> xgrammar.CompiledGrammar:
    """xgrammar compiles without the GIL: other threads go on."""
    compiler = xgrammar.GrammarCompiler(_tokenizer(facts), max_threads=1, cache_enabled=False)
    return compiler.compile_grammar(grammar)


def load(grammar: Grammar, facts: TokenizerFacts) -> "XgrammarMatcher":
    """Raises:
    GrammarExhausted: the grammar was compiled by another version.
    """
    try:
        compiled = _compiled(xgrammar.Grammar.deserialize_json(grammar.source.decode()), facts)
    except Exception as error:
        raise GrammarExhausted(_sentence(str(error))) from error
    return XgrammarMatcher(facts, xgrammar.GrammarMatcher(compiled))


class XgrammarMatcher(Matcher):
    """Wraps xgrammar's matcher."""

    __slots__ = ("_native",)

    def __init__(self, facts: TokenizerFacts, native: xgrammar.GrammarMatcher) -> None:
        super().__init__(facts)
        self._native = native

    def _take(self, token_ids: list[int]) -> int:
        for index, token_id in enumerate(token_ids):
            if token_id in self.facts.special_ids or not self._native.accept_token(token_id):
                return index
        return len(token_ids)

    def _give_back(self, num_tokens: int) -> None:
        self._native.rollback(num_tokens)

    def _fill(self, row: BitmaskRow) -> None:
        if not self._native.fill_next_token_bitmask(row[np.newaxis]):
            row[:] = -1  # xgrammar does not write a row in which every token is allowed

    def _forced(self) -> list[int]:
        forced: list[int] = []
        row = np.empty_like(self.facts.eos_mask)
        matcher = self
        while len(forced) < MAX_FORCED:
            matcher._fill(row)
            token_id = single_token(row)
            if token_id is None or token_id in self.facts.eos_token_ids:
                break
            if not forced:
                matcher = self._copy()
            forced.append(token_id)
            matcher._take([token_id])
        return forced

    def _may_end(self) -> bool:
        return self._native.is_completed()

    def _copy(self) -> "XgrammarMatcher":
        return XgrammarMatcher(self.facts, self._native.fork())


def _sentence(error: str) -> str:
    """xgrammar's error without its own source position."""
    text = re.sub(r"^\[[\d:]+\] \S+: ", "", error.strip())
    return " ".join(text.split())[:500]
