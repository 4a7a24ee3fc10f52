"""The examples in docstrings run and give the results shown."""

import doctest
import importlib

import pytest

from tests.docs.pages import ROOT

MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "radixrt").rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.IGNORE_EXCEPTION_DETAIL
    )
    assert results.attempted > 0 and results.failed == 0
