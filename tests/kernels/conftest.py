"""Runs a test once for each instruction set that this build and this processor have."""

from collections.abc import Iterator

import pytest

import radixrt_kernels

ISAS = radixrt_kernels.native.usable_isas() if radixrt_kernels.native is not None else []


@pytest.fixture(params=ISAS or ["not compiled"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The instruction set that kernels use during the test."""
    native = radixrt_kernels.native
    if native is None:
        pytest.skip(f"no native kernels: {radixrt_kernels.missing_because}")
    before = native.isa()
    native.use_isa(request.param)
    yield request.param
    native.use_isa(before)
