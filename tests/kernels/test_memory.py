"""Huge pages are asked for where that can be, and never change what a tensor holds."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixrt_kernels.memory import Slabs, advise_huge_pages

ROOT = Path(__file__).parent.parent.parent


def test_large_tensors_may_be_advised_and_stay_as_they_are(isa: str) -> None:
    tensor = torch.full((5 << 20,), 3, dtype=torch.float16)
    taken = advise_huge_pages(tensor)
    assert not taken or sys.platform == "linux"
    assert bool((tensor == 3).all())


def test_small_tensors_are_left_alone(isa: str) -> None:
    assert not advise_huge_pages(torch.zeros(1000))


def test_gaps_are_refused(isa: str) -> None:
    with pytest.raises(ValueError, match="without gaps"):
        advise_huge_pages(torch.zeros(4, 4)[:, :2])


def test_memory_that_was_freed_is_kept_and_used_again() -> None:
    """In a process of its own, where no test has chosen an instruction set."""
    code = """
import resource, torch
from radixrt_kernels.memory import keep_freed_memory
if keep_freed_memory():
    for _ in range(30):  # until a hole has grown in which a tensor fits with its alignment
        torch.ones(20 << 20, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(20 << 20, dtype=torch.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 5120, faults  # a single such tensor has so many pages of 4 KiB
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_slabs_hold_tensors_side_by_side_until_they_are_full() -> None:
    slabs = Slabs()
    first, second, large = (slabs.take(size) for size in (100, 1000, Slabs.SIZE))
    assert second.data_ptr() == first.data_ptr() + 128
    assert (len(first), len(second), len(large)) == (100, 1000, Slabs.SIZE)
    assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
