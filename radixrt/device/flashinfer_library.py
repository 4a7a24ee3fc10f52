"""How is FlashInfer imported? In one way, wherever it is called from."""

import os
from typing import Any


def load_flashinfer() -> Any:
    """The package ``flashinfer``; the first call takes seconds, and makes a folder.

    Where nvidia-cutlass-dsl is installed, which pip brings along, FlashInfer would write its norms in it and compile them
    for each shape when they are called. Its CUDA kernels are one module, which can be compiled ahead, so
    they are preferred; ``FLASHINFER_USE_CUDA_NORM=0`` asks for the others.
    """
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # read when flashinfer is imported
    import flashinfer

    return flashinfer
