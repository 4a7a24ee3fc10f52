"""Selects the instruction set of the kernels: the best one, unless it computes wrong products."""

import warnings
from types import ModuleType

COMPARED = {"amx": ("AMX", "avx512_bf16", "AVX-512"), "avx2_vnni": ("AVX-VNNI", "avx2", "AVX2")}
"""Instruction sets that no processor in the project's reach has: their name, and the instruction
set, with its name, that they have to agree with."""


def choose(native: ModuleType, wanted: str | None) -> None:
    """Make ``native`` use ``wanted``, or by default the best instruction set.

    AMX and AVX-VNNI are used only if they compute the same products as AVX-512 and AVX2 for some
    test matrices. Otherwise a faulty processor, hypervisor or emulator would stay unnoticed. The
    test takes some hundred microseconds, once per process.

    Raises:
        ValueError: this build or this processor does not have ``wanted``.
    """
    if wanted:
        native.use_isa(wanted)
    name, other, other_name = COMPARED.get(native.isa(), ("", "", ""))
    if other and not native.same_products(native.isa(), other):
        native.use_isa(other)
        warnings.warn(
            f"{name} computes wrong products on this machine, so the kernels use {other_name} instead, which is slower. Please "
            f"report it with the processor's name; RADIXRT_KERNELS_ISA={other} avoids this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
