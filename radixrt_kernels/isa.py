"""Selects the instruction set of the kernels: the best one, unless its AMX tiles compute wrong
products."""

import warnings
from types import ModuleType


def choose(native: ModuleType, wanted: str | None) -> None:
    """Make ``native`` use ``wanted``, or by default the best instruction set.

    AMX is used only if it computes the same products as AVX-512 for some test matrices. Otherwise a
    faulty processor, hypervisor or emulator would stay unnoticed. The test takes some hundred
    microseconds, once per process.

    Raises:
        ValueError: this build or this processor does not have ``wanted``.
    """
    if wanted:
        native.use_isa(wanted)
    if native.isa() == "amx" and not native.same_products("amx", "avx512_bf16"):
        native.use_isa("avx512_bf16")
        warnings.warn(
            "AMX computes wrong products on this machine, so the kernels use AVX-512 instead, which is slower. Please report "
            "it with the processor's name; RADIXRT_KERNELS_ISA=avx512_bf16 avoids this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
