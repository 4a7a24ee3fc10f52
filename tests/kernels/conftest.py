"""Runs a test once for each instruction set that this build and this processor have: in ``make
test`` so many cases on the set in use that it has each pair of values of two parameters, and on
each other one so many that it has each value of each parameter. ``make test-kernels`` runs all on
all."""

import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import radixrt_kernels

ISAS = radixrt_kernels.native.usable_isas() if radixrt_kernels.native is not None else []
IN_FULL = "RADIXRT_EVERY_KERNEL" in os.environ


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    native = radixrt_kernels.native
    if IN_FULL or native is None:
        return
    folder = Path(__file__).parent
    ours = [item for item in items if item.path.parent == folder and hasattr(item, "callspec")]
    left_out = set(without_new_values(ours, native.isa()))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def without_new_values(items: list[pytest.Item], in_use: str) -> Iterator[pytest.Item]:
    """Cases whose parameters' values, or pairs of values on the instruction set in use, are all in
    other cases of the set. The order of the cases is another one for each set, so that the sets do
    not all have the same ones."""
    sets: defaultdict[tuple[str, str], dict[pytest.Item, set[frozenset[tuple[str, str]]]]]
    sets = defaultdict(dict)
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        params = item.callspec.params  # type: ignore[attr-defined]
        isa = params.get("isa", in_use)
        values = [(name, str(value)) for name, value in params.items() if name != "isa"]
        if values:
            size = min(2 if isa == in_use else 1, len(values))
            combinations = set(map(frozenset, itertools.combinations(values, size)))
            sets[item.nodeid.partition("[")[0], isa][item] = combinations
    for left in sets.values():
        while left:
            most = max(left, key=lambda item: len(left[item]))
            new = left.pop(most)
            for item, combinations in list(left.items()):
                combinations -= new
                if not combinations:
                    del left[item]
                    yield item
