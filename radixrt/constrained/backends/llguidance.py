"""Compiles constraints to llguidance's grammar text, and matches answers against it.

llguidance is the default for JSON schemas: on 9,795 real schemas it accepted no invalid instance.
"""

import functools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from radixrt.base.settings.setting import WhitespaceName
from radixrt.constrained.backends.any_order import lark_in_any_order
from radixrt.constrained.backends.ebnf import lark_of_ebnf
from radixrt.constrained.backends.lark import check_lark
from radixrt.constrained.bitmask import BitmaskRow
from radixrt.constrained.errors import CannotCompile, GrammarExhausted
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import MAX_FORCED, Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts

Answer = TypeVar("Answer")

_WHITESPACE: dict[WhitespaceName, str] = {"flexible": r"( |\n( {0,32}|\t{0,8}))?", "compact": ""}
"""White space allowed at each gap of a JSON text. It is bounded: a model that may write endless
white space does."""

_LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, step_max_items=1_000_000)
"""A lexer state takes 1 to 2 kB, and the worker holds hundreds of grammars. At the library's own
limits on items, objects of a few hundred optional properties fail in the middle of an answer, at a
vocabulary of 128k also smaller ones; at these, an object may have 2,000 (measured: a mask then
takes 0.2 s, of 500 12 ms)."""

_FIRST_STEP_S = 0.5
"""The worker's other answers wait while a first mask is made; real schemas take 10 ms."""


# ---------------------------------------------------------------- compiling


def json_schema_options(whitespace: WhitespaceName) -> dict[str, Any]:
    """The options with which llguidance refuses keywords that it does not enforce.

    The escapes leave out ``\\u`` and ``\\/``: with them a declared key could be written in a second
    way, and be taken for an undeclared one.
    """
    return {
        "lenient": False,
        "coerce_one_of": False,
        "json_allowed_escapes": 'nrbtf\\"',
        "whitespace_pattern": _WHITESPACE[whitespace],
    }


def compile_json_schema(schema: str, facts: TokenizerFacts, whitespace: WhitespaceName) -> Grammar:
    """Raises CannotCompile if llguidance refuses the schema."""
    options: Any = json_schema_options(whitespace)
    try:
        source = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        raise CannotCompile(_sentence(str(error))) from error
    return _checked(source, facts)


def compile_without_tokenizer(schema: str) -> tuple[str, str | None]:
    """The grammar text of a schema and None, or an empty text and llguidance's error."""
    options: Any = json_schema_options("flexible")
    try:
        source = LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except ValueError as error:
        return "", str(error)
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, _byte_tokenizer())
    return ("", "; ".join(messages)) if failed else (source, None)


def schema_error(schema: str) -> str | None:
    """llguidance's error for the text of a schema; None if it compiles."""
    return compile_without_tokenizer(schema)[1]


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def compile_in_any_order(schema: Any, facts: TokenizerFacts, whitespace: WhitespaceName) -> Grammar:
    """As :func:`compile_json_schema`, of a normalised schema; objects take their properties in any
    order. Raises CannotCompile if llguidance refuses the schema."""
    lark = lark_in_any_order(schema, json_schema_options(whitespace))
    return _checked(LLMatcher.grammar_from_lark(lark), facts)


def compile_grammars(
    grammars: list[dict[str, Any]], facts: TokenizerFacts, *, is_ambiguous: bool
) -> Grammar:
    """Several grammars, of which the first may refer to the others by name. Raises CannotCompile if
    llguidance refuses one."""
    return _checked(json.dumps({"grammars": grammars}), facts, is_ambiguous=is_ambiguous)


def compile_regex(pattern: str, facts: TokenizerFacts) -> Grammar:
    """Raises CannotCompile if the pattern is no regular expression, or matches nothing."""
    return _checked(LLMatcher.grammar_from_regex(pattern), facts)


def compile_lark(grammar: str, facts: TokenizerFacts) -> Grammar:
    """Raises CannotCompile if it is no Lark grammar as llguidance reads them, allows nothing, or
    has a rule that can't be kept."""
    check_lark(grammar)
    return _checked(LLMatcher.grammar_from_lark(grammar), facts, is_ambiguous=True)


def compile_ebnf(grammar: str, facts: TokenizerFacts) -> Grammar:
    """Raises CannotCompile if it is no EBNF, allows nothing, or has a rule that can't be kept."""
    lark = lark_of_ebnf(grammar)
    return _checked(LLMatcher.grammar_from_lark(lark), facts, is_ambiguous=True)


def matcher_for_checks(grammar: Grammar, facts: TokenizerFacts) -> "LlguidanceMatcher":
    """As :func:`load`, without the slices, which take 82 MB for 262,144 tokens."""
    facts.tokenizer  # noqa: B018 (read before the first mask)
    return LlguidanceMatcher(grammar, facts, _native(grammar, facts, _tokenizer_of_checks(facts)))


def _checked(source: str, facts: TokenizerFacts, *, is_ambiguous: bool = False) -> Grammar:
    """The grammar, if a first token can be found for it."""
    native = LLMatcher(_tokenizer_of_checks(facts), source, log_level=0, limits=_LIMITS)
    if native.is_error():
        raise CannotCompile(_sentence(native.get_error()))
    row = np.zeros_like(facts.eos_mask)
    begin = time.thread_time()
    native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    native.compute_ff_tokens()
    first_step_s = time.thread_time() - begin
    if native.is_error():
        raise CannotCompile(_sentence(native.get_error()))
    if first_step_s > _FIRST_STEP_S:
        raise CannotCompile(
            f"To find its first token takes {first_step_s:.1f} s, and all answers would wait; shorten its texts, or "
            "lower the bounds of its repetitions."
        )
    if not row.any():
        raise CannotCompile("Nothing satisfies it, or nothing that this model's tokens can spell.")
    return Grammar.compiled("llguidance", source.encode(), is_ambiguous=is_ambiguous)


def _sentence(error: str) -> str:
    """llguidance's error without the excerpt of the grammar that follows it; adds the remedy."""
    lines = [line.strip() for line in error.strip().split("\n")]
    details = [line for line in lines[1:] if line.startswith("error:")]
    first = " ".join([lines[0], *details])[:500]
    if first in ("NoExtension", "NoExtensionBias"):
        return "Nothing satisfies it."
    if "lookaround" in first or "look-around" in first:
        return f"{first} Write it without lookahead, lookbehind and word borders."
    if "backreference" in first:
        return f"{first} Write it without references to groups."
    return first


# ---------------------------------------------------------------- matching


class _Encoder:
    """The tokenizer interface that llguidance expects. Until the tokenizer is read, texts are
    written in the longest tokens from left to right."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, facts: TokenizerFacts) -> None:
        self.eos_token_id = facts.eos_token_ids[0]
        self.special_token_ids = sorted(facts.special_ids)
        self.native: LLTokenizer
        self._facts = facts

    @property
    def tokens(self) -> list[bytes]:
        """Not kept: llguidance copies them."""
        return list(self._facts.tokens)

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode()
        return (
            self._facts.encode(text)
            if self._facts.has_tokenizer
            else self.native.greedy_tokenize(text)
        )


@functools.lru_cache(maxsize=4)
def _tokenizer_of_checks(facts: TokenizerFacts) -> LLTokenizer:
    """A tokenizer that is ready in a third of the time of :func:`_tokenizer`. It needs no
    tokenizer: which tokens are forced makes no difference to whether there are any. It has no
    slices, the masks of common regular expressions, which pay for many steps only."""
    wrapper: Any = _Encoder(facts)
    native = LLTokenizer(
        wrapper, n_vocab=facts.vocab_size, eos_token=list(facts.eos_token_ids), slices=[]
    )
    wrapper.native = native
    return native


@functools.lru_cache(maxsize=4)
def _tokenizer(facts: TokenizerFacts) -> LLTokenizer:
    facts.tokenizer  # noqa: B018 (read before the first mask)
    return _tokenizer_of_checks(facts).with_slices(LLTokenizer.general_slices())


def load(grammar: Grammar, facts: TokenizerFacts) -> "LlguidanceMatcher":
    """Raises GrammarExhausted if it was compiled for another tokenizer, or by another version."""
    return LlguidanceMatcher(grammar, facts, _native(grammar, facts))


def _native(
    grammar: Grammar, facts: TokenizerFacts, tokenizer: LLTokenizer | None = None
) -> LLMatcher:
    tokenizer = tokenizer or _tokenizer(facts)
    native = LLMatcher(tokenizer, grammar.source.decode(), log_level=0, limits=_LIMITS)
    if native.is_error():
        raise GrammarExhausted(_sentence(native.get_error()))
    return native


_of_thread = threading.local()

_NOT_ALLOWED = "satisfy the grammar"
"""Part of the error for a token that is not allowed; after another error it is tried again."""


def _consume(native: LLMatcher, token_id: int, facts: TokenizerFacts) -> bool:
    """Let a native matcher take a token, without Python's lock.

    The library's only call that takes a token without the lock is the one for several matchers, so
    a dead one goes with it.
    """
    if not hasattr(_of_thread, "executor"):
        _of_thread.executor = LLExecutor(1)
        _of_thread.dead = LLMatcher(_tokenizer_of_checks(facts), "", log_level=0)
    pair = [(native, token_id), (_of_thread.dead, token_id)]
    return _of_thread.executor.consume_token_par(pair)[0]


class LlguidanceMatcher(Matcher):
    """Wraps llguidance's matcher.

    In a state where the next bytes are certain, its mask holds only the token that the tokenizer
    would write there; any other way to write the same bytes is still taken by :meth:`advance`.

    Copies of a native matcher share a lexer: if one runs into a limit, all of them fail. A matcher
    that fails is therefore built again, alone, from the tokens that it has taken. Only if that
    fails too, its methods raise GrammarExhausted.
    """

    __slots__ = ("_grammar", "_native")

    def __init__(self, grammar: Grammar, facts: TokenizerFacts, native: LLMatcher) -> None:
        super().__init__(facts)
        self._grammar = grammar
        self._native = native

    @property
    def is_ambiguous(self) -> bool:
        return self._grammar.is_ambiguous

    def forced_bytes(self) -> bytes:
        """Bytes with which every continuation begins."""
        return b"" if self._ended else self._alive().compute_ff_bytes()

    def _take(self, token_ids: list[int]) -> int:
        if self._grammar.is_ambiguous:
            return self._take_without_lock(token_ids)
        return self._asked(lambda native: native.try_consume_tokens(token_ids))

    def _take_without_lock(self, token_ids: list[int]) -> int:
        """As :meth:`_take`, without Python's lock. A token that is not allowed kills the native
        matcher, as a limit does; it is made anew when it is needed."""
        self._alive()
        for index, token_id in enumerate(token_ids):
            if _consume(self._native, token_id, self.facts):
                continue
            if _NOT_ALLOWED in self._native.get_error():
                return index
            self._revive(self._taken + token_ids[:index])
            if not _consume(self._native, token_id, self.facts):
                return index
        return len(token_ids)

    def _give_back(self, num_tokens: int) -> None:
        if self._native.is_error() or not self._native.rollback(num_tokens):
            self._revive()

    def _fill(self, row: BitmaskRow) -> None:
        self._asked(lambda native: native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))

    def _forced(self) -> list[int]:
        return self._asked(lambda native: native.compute_ff_tokens())[:MAX_FORCED]

    def _may_end(self) -> bool:
        return self._alive().is_accepting()

    def _copy(self) -> "LlguidanceMatcher":
        return LlguidanceMatcher(self._grammar, self.facts, self._alive().deep_copy())

    def _asked(self, question: Callable[[LLMatcher], Answer]) -> Answer:
        """The answer of the native matcher; of a second one if the first fails at the question."""
        answer = question(self._alive())
        if self._native.is_error():
            self._revive()
            answer = question(self._native)
            self._raise_if_dead()
        return answer

    def _alive(self) -> LLMatcher:
        """The native matcher, made anew if a copy's error has reached it."""
        if self._native.is_error():
            self._revive()
        return self._native

    def _revive(self, taken: list[int] | None = None) -> None:
        self._native = _native(self._grammar, self.facts)
        for token_id in self._taken if taken is None else taken:
            if not _consume(self._native, token_id, self.facts):
                self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self._native.is_error():
            raise GrammarExhausted(
                f"The grammar became too complex in the middle of the answer; simplify it. "
                f"({_sentence(self._native.get_error())})"
            )
