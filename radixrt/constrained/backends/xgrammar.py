"""Compiles EBNF grammars and audited JSON schemas with xgrammar, and matches answers against them.

xgrammar parses EBNF byte by byte, so no token is lost at the border between lexemes. Its converter of JSON
schemas drops some keywords silently; only schemas that the audit allows are compiled here. Importing this module
takes seconds (xgrammar imports torch and transformers), so it is imported only when such a grammar comes.
"""

import functools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import xgrammar

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.bitmask import BitmaskRow, single_token
from radixrt.constrained.errors import CannotCompile, GrammarExhausted
from radixrt.constrained.finite import cause_of, endless_symbols
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import MAX_FORCED, Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts

MAX_COMPILED_BYTES = 128 << 20
"""Memory of a grammar in the worker. It grows with the square of the number of rules that begin with one another."""

_MOST_WHITESPACE = 33
"""Characters at each gap of a JSON text, as many as llguidance gets at most."""


_RULE, _SEQUENCE, _CHOICES, _REPEAT = 4, 5, 6, 8
"""Kinds of expressions in xgrammar's JSON form of a grammar: a reference to a rule, ..."""


_EBNF_TOKEN = re.compile(
    r"""(?P<blank>\s++|\#[^\n]*+)|"(?:\\.|[^"\\\n])*+(?:"|(?=\n)|\\?\Z)|\[(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|::=
    |(?P<rule>[\w.-]++(?=\s*+::=))|(?P<dots>\.+(?![\w-]))|[\w.-]+|.""",
    re.VERBOSE | re.DOTALL,
)
"""In linear time: what is never closed goes on to the end."""
_ANY_CHARACTER = r"[\u0000-\U0010FFFF]"


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


def compile_ebnf(grammar: str, facts: TokenizerFacts) -> Grammar:
    """Raises:
    CannotCompile: it is no EBNF as xgrammar reads it, allows nothing, or has a rule without a finite sentence.
    """
    return _checked(lambda: _with_an_end(grammar), facts)


def _with_an_end(text: str) -> xgrammar.Grammar:
    """The grammar as xgrammar reads it.

    Raises:
        CannotCompile: a rule that can be reached has no finite sentence.
    """
    grammar = xgrammar.Grammar.from_ebnf(in_xgrammars_form(text))
    read = json.loads(grammar.serialize_json())
    rules, data, starts = read["rules"], read["grammar_expr_data"], read["grammar_expr_indptr"]
    absent = -1  # stands for the empty text where a part may be left out

    def needs(expression: int) -> list[list[int]]:
        if expression == absent:
            return []
        kind, size = data[starts[expression]], data[starts[expression] + 1]
        parts = data[starts[expression] + 2 : starts[expression] + 2 + size]
        if kind == _RULE:
            return [[rules[parts[0]][1]]]
        if kind == _SEQUENCE:
            return [[part] for part in parts]
        if kind == _CHOICES:
            return [parts]
        if kind == _REPEAT:
            return [[rules[parts[0]][1], *([absent] if parts[1] == 0 else ())]]
        return []

    if endless := endless_symbols([rules[read["root_rule_id"]][1]], needs):
        names = {rule[1]: rule[0] for rule in rules}
        cause = cause_of(endless, needs)
        name = names.get(cause) or next(names[each] for each in endless if each in names)
        raise CannotCompile(
            f"The rule {name!r} has no finite text: each of its alternatives needs the rule again. Give it an alternative "
            "without."
        )
    return grammar


def in_xgrammars_form(text: str) -> str:
    r"""A grammar without what GBNF has and xgrammar has not: alternatives without a text, and ``.`` for any character.

    >>> print(in_xgrammars_form('root ::= ( . | ) gap'))
    root ::= ( [\u0000-\U0010FFFF] | "") gap
    >>> print(in_xgrammars_form('gap ::= | " "'))
    gap ::= ""| " "
    """
    written, before = [], ""
    for match in _EBNF_TOKEN.finditer(text):
        token = match[0]
        if match["blank"] is None:
            ends = token in ("|", ")") or match["rule"] is not None
            written.append('""' if ends and before in ("::=", "(", "|") else "")
            before = token
        written.append(_ANY_CHARACTER * len(token) if match["dots"] else token)
    return "".join(written) + ('""' if before in ("::=", "|") else "")


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
