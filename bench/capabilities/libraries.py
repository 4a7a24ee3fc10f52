"""Compiles schemas with each installed grammar library and matches texts against them.

Texts are matched byte by byte: acceptance does not depend on the vocabulary.
"""

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from radixrt.constrained.json_schema.auditing.compiling import llguidance_grammar

Acceptor = Callable[[bytes], bool]
"""Whether a text is accepted from beginning to end."""


def versions() -> dict[str, str]:
    """Of the installed libraries."""
    return {name: version(name) for name in COMPILERS}


def compile_llguidance(schema: Any) -> Acceptor | None:
    """None if it refuses the schema."""
    from llguidance import LLMatcher, LLTokenizer

    grammar, error = llguidance_grammar(json.dumps(schema))
    if error:
        return None
    tokenizer = LLTokenizer("byte")
    start = LLMatcher(tokenizer, grammar)

    def accepts(text: bytes) -> bool:
        matcher = start.deep_copy()
        return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()

    return accepts


def compile_xgrammar(schema: Any) -> Acceptor | None:
    """None if it refuses the schema."""
    import xgrammar

    compiler = _xgrammar_compiler()
    try:
        compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
    except RuntimeError:
        return None

    def accepts(text: bytes) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()

    return accepts


def _xgrammar_compiler() -> Any:
    import xgrammar

    # Texts are given as bytes, so one token will do. Masks of more would take most of the time of a table.
    tokens = xgrammar.TokenizerInfo([b"a"], xgrammar.VocabType.RAW, stop_token_ids=[])
    return xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


def compile_outlines(schema: Any) -> Acceptor | None:
    """None if it refuses the schema. What its regular expression matches is what its index would allow."""
    from outlines_core.json_schema import build_regex_from_schema

    try:
        expression = re.compile(build_regex_from_schema(json.dumps(schema)))
    except (ValueError, TypeError, RuntimeError, re.error):
        return None
    return lambda text: expression.fullmatch(text.decode()) is not None


COMPILERS: dict[str, Callable[[Any], Acceptor | None]] = {
    "llguidance": compile_llguidance,
    "xgrammar": compile_xgrammar,
    "outlines-core": compile_outlines,
}
