"""Native kernels for the CPU: C++ compiled once for each instruction set, chosen at run time.

A module here is one kernel family (``activation``, ``attention``, ...). Its functions check shapes, dtypes and strides
and raise ``ValueError`` or ``TypeError`` rather than read out of bounds; ``radixrt_kernels.reference`` says in plain
torch what they compute. Where the package was installed without a compiler, ``native`` is None and callers use torch.

Environment:
    RADIXRT_KERNELS_ISA: an instruction set below the best one, for tests: ``baseline``, ``avx2``, ``avx512``, ...
    RADIXRT_KERNELS=off: as if nothing had been compiled.
"""

import importlib
import os
from types import ModuleType

from radixrt_kernels import isa

native: ModuleType | None = None
"""The compiled module, or None."""

missing_because = ""
"""Why ``native`` is None, for the person who wonders."""

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
    """Whether the native kernels can be called."""
    return native is not None
