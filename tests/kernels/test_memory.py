"""Huge pages are asked for where that can be, and never change what a tensor holds."""

import sys

import pytest
import torch

from radixrt_kernels.memory import advise_huge_pages


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
