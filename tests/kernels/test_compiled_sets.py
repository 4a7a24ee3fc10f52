"""Families of kernels are compiled for every instruction set of which they use an operation."""

import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "radixrt_kernels"
SOURCES = KERNELS / "csrc"
FAMILIES = {path.stem for path in SOURCES.glob("kernels/*.cpp")}


def with_headers(source: Path) -> set[Path]:
    """A file and the files of ours that it includes, also by others."""
    found, new = set[Path](), {source}
    while new:
        found |= new
        included = {
            SOURCES / name
            for path in new
            for name in re.findall(r'#include "(.+)"', path.read_text())
        }
        new = {path for path in included - found if path.exists()}
    return found


@pytest.mark.parametrize(
    ("isa", "of_its_operations"),
    [
        ("avx2_vnni", r"__AVXVNNI__"),
        ("avx512_bf16", r"__AVX512(BF16|VNNI)__"),
        ("amx", r"RADIXRT_HAS_AMX"),
    ],
)
def test_the_families_that_use_an_operation_are_compiled_for_it(
    isa: str, of_its_operations: str
) -> None:
    (listed,) = re.findall(rf"set\({isa}_FAMILIES (.+)\)", (KERNELS / "CMakeLists.txt").read_text())
    assert set(listed.split()) == {
        family
        for family in FAMILIES
        if any(
            re.search(of_its_operations, path.read_text())
            for path in with_headers(SOURCES / f"kernels/{family}.cpp")
        )
    }
