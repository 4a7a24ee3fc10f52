"""Imports FlashInfer with the settings that radixrt needs."""

import os
from typing import Any


def load_flashinfer() -> Any:
    """The package ``flashinfer``; the first call takes seconds, and makes a folder.

    Where nvidia-cutlass-dsl is installed, which pip brings along, FlashInfer would compile its norms by it for each shape
    when they are called. Its CUDA norms are one module, which can be compiled ahead, so they are preferred;
    ``FLASHINFER_USE_CUDA_NORM=0`` chooses the others.
    """
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # read when flashinfer is imported
    import flashinfer

    return flashinfer
