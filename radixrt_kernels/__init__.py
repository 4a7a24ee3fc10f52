"""Native kernels for the CPU, in C++, compiled once per instruction set and selected at run time.

Each module is one kernel family (``activation``, ``attention``, ...). Its functions check shapes,
dtypes and strides, and raise ``ValueError`` or ``TypeError`` instead of reading out of bounds.
``radixrt_kernels.reference`` has the same functions in plain torch. If the package was installed
without a compiler, ``native`` is None and callers use torch.

Environment variables:
    RADIXRT_KERNELS_ISA: selects a lower instruction set, for tests: ``baseline``, ``avx2``,
    ``avx512``, ... RADIXRT_KERNELS: ``off`` disables the compiled kernels.
"""

import importlib
import os
from types import ModuleType

from radixrt_kernels import isa

native: ModuleType | None = None
"""The compiled module, or None."""

missing_because = ""
"""The reason if ``native`` is None, for log messages."""

if os.environ.get("RADIXRT_KERNELS") == "off":
    missing_because = "RADIXRT_KERNELS=off is set"
else:
    try:
        native = importlib.import_module("radixrt_kernels._native")
    except ImportError as error:
        missing_because = (
            f"they were not compiled when radixrt was installed ({error}): install a C++ compiler "
            "(g++ or clang++), then radixrt again"
        )

if native is not None:
    isa.choose(native, os.environ.get("RADIXRT_KERNELS_ISA"))


def available() -> bool:
    """Return whether the native kernels can be called."""
    return native is not None
