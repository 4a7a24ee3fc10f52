"""Which instruction set do the kernels use? The best there is, unless its tiles compute something else than vectors do."""

import warnings
from types import ModuleType


def choose(native: ModuleType, wanted: str | None) -> None:
    """Let ``native`` use ``wanted``, or by default what it takes for the best here.

    AMX is trusted only after it has multiplied some numbers as AVX-512 does: nobody else would notice a processor, a
    hypervisor or an emulator on which it goes wrong. That takes some hundred microseconds, once a process.

    Raises:
        ValueError: ``wanted`` is not one that this build and this processor have.
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
