"""Tests that need an NVIDIA GPU: ``make gpu-check`` runs them, and elsewhere they skip."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without = pytest.mark.skip(reason="torch finds no CUDA device")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(without)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test where FlashInfer lacks a kernel and may not compile it."""
    try:
        return (yield)
    except Exception as error:
        if item.path.is_relative_to(HERE) and any(
            type(cause).__name__ == "MissingJITCacheError" for cause in _causes(error)
        ):
            pytest.skip(f"a kernel was not compiled ahead: {error}")
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from: the worker says it in words of its own."""
    while error is not None:
        yield error
        error = error.__cause__
