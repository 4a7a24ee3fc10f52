"""Tokenizer processes in the tests' own process."""

from collections.abc import Iterator

import pytest

from tests.servers.compilers import compilers_on_demand


@pytest.fixture(autouse=True)
def _compilers_on_demand() -> Iterator[None]:
    with compilers_on_demand():
        yield
