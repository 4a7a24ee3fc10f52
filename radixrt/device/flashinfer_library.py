"""Imports FlashInfer with the settings that radixrt needs."""

import inspect
import os
from typing import Any

TRACING = ("FLASHINFER_LOGLEVEL", "FLASHINFER_TRACE_DUMP")
"""Environment variables by which a user asks FlashInfer to log or trace calls."""


def load_flashinfer() -> Any:
    """The package ``flashinfer``; the first call takes seconds, and makes a folder.

    Where nvidia-cutlass-dsl is installed, which pip brings along, FlashInfer would compile its
    norms by it for each shape when they are called. Its CUDA norms are one module, which can be
    compiled ahead, so they are preferred; ``FLASHINFER_USE_CUDA_NORM=0`` chooses the others.
    """
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # read when flashinfer is imported
    import flashinfer

    return flashinfer


class UntracedFunctions:
    """FlashInfer's functions without the decorator that reads the environment at each call, for
    logs and traces.

    This read takes longer than a launch, and an eager step has about 150 calls. If logs or traces
    are requested, the decorated functions are used.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._traced = any(os.environ.get(name, "0") not in ("", "0") for name in TRACING)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if not self._traced:
            function = inspect.unwrap(function)
        setattr(self, name, function)  # found without this method from now on
        return function
