"""The examples in the language's docstrings run."""

import doctest
import importlib

import pytest

MODULES = ("backends.server", "expressions", "function", "sampling", "state", "tools", "tracing.recorder", "typed")  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_print_what_they_say(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"radixrt.lang.{name}"))
    assert results.attempted > 0 and results.failed == 0
