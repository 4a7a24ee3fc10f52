"""Compiles a schema with a library for trial, and returns the library's reason if it refuses."""

import functools
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from radixrt.constrained.backends.llguidance import json_schema_options

Trial = Callable[[str, str], tuple[Any, str | None]]
"""Compiles the text of a schema with a backend; returns (grammar, None), or (anything, the backend's error)."""

LLGUIDANCE_OPTIONS: Any = json_schema_options("flexible")


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def llguidance_grammar(schema_text: str) -> tuple[str, str | None]:
    """(grammar, None), or (empty, llguidance's error)."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema_text, overrides=LLGUIDANCE_OPTIONS)
    except ValueError as error:
        return "", str(error)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, _byte_tokenizer())
    if failed:
        return "", "; ".join(messages)
    return grammar, None


def dry_run(backend: str, text: str) -> tuple[None, str | None]:
    """A trial that needs no tokenizer, and keeps nothing."""
    return None, compile_error(backend, text)


def compile_error(backend: str, text: str) -> str | None:
    """The backend's error for the text of a schema; None if it compiles."""
    if backend == "llguidance":
        return llguidance_grammar(text)[1]
    return _xgrammar_error(text)


def _xgrammar_error(text: str) -> str | None:
    import xgrammar

    try:
        xgrammar.Grammar.from_json_schema(text, strict_mode=False)
    except RuntimeError as error:
        return str(error).strip().splitlines()[-1]
    return None
