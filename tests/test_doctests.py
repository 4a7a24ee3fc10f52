"""The examples in docstrings run and give what they show."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import radixrt_kernels

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("radixrt", "radixrt_kernels")
    for file in sorted((ROOT / package).rglob("*.py"))
    if re.search(r"^ *>>> ", file.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_show(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] in ("radixrt", "radixrt_kernels"):
            raise
        pytest.skip(f"{error.name} is not installed")
    if name.startswith("radixrt_kernels.") and radixrt_kernels.native is None:
        pytest.skip(f"no native kernels: {radixrt_kernels.missing_because}")
    result = doctest.testmod(module)
    assert result.attempted, "pytest finds an example that doctest does not"
    assert not result.failed
