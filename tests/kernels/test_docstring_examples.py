"""The examples in the docstrings of the kernels run and give the printed results."""

import doctest
import importlib

import pytest

import radixrt_kernels

FAMILIES = ["activation", "attention", "groupwise", "linear", "norm", "rotary", "sampler"]


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_give_the_printed_results(family: str) -> None:
    if radixrt_kernels.native is None:
        pytest.skip(f"no native kernels: {radixrt_kernels.missing_because}")
    failed, attempted = doctest.testmod(importlib.import_module(f"radixrt_kernels.{family}"))
    assert attempted and not failed
