"""What tests on a GPU need, as marks: ``pytestmark = NEEDS_GPU``."""

import importlib.util

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
NEEDS_FLASHINFER = [
    *NEEDS_GPU,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None, reason="needs the package flashinfer"
    ),
]
