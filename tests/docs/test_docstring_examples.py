"""The examples in docstrings run as they are written."""

import doctest
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "radixrt"
MODULES = [
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0 and results.failed == 0
