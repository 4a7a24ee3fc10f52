"""Compiles a schema with llguidance for trial, and returns its reason if it refuses."""

import functools
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from radixrt.constrained.backends.llguidance import json_schema_options

Trial = Callable[[str], tuple[Any, str | None]]
"""Compiles the text of a schema; returns (grammar, None), or (anything, llguidance's error)."""

_OPTIONS: Any = json_schema_options("flexible")


@functools.cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def dry_run(text: str) -> tuple[str, str | None]:
    """A trial that needs no tokenizer: the grammar is llguidance's text."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_OPTIONS)
    except ValueError as error:
        return "", str(error)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, _byte_tokenizer())
    return ("", "; ".join(messages)) if failed else (grammar, None)


def compile_error(text: str) -> str | None:
    """llguidance's error for the text of a schema; None if it compiles."""
    return dry_run(text)[1]
