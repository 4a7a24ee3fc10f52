"""Attention backends by name: the values of ``--attention-backend`` and what each stands for."""

import logging
from collections.abc import Callable

from radixrt.attention.backend import AttentionBackend
from radixrt.attention.cpu import CPU_CACHE_DTYPES, CpuBackend
from radixrt.attention.flashinfer import make_flashinfer, why_not
from radixrt.attention.setup import AttentionSetup
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.base.errors import ConfigError
from radixrt_kernels import available

log = logging.getLogger(__name__)


def _torch_reference(setup: AttentionSetup) -> AttentionBackend:
    return TorchReferenceBackend()


_BACKENDS: dict[str, Callable[[AttentionSetup], AttentionBackend]] = {
    "cpu": CpuBackend,
    "flashinfer": make_flashinfer,
    "torch_reference": _torch_reference,
}


def resolve_backend(name: str, setup: AttentionSetup) -> str:
    """What a value of ``--attention-backend`` means for a worker: ``auto`` is the fastest that runs there.

    Raises:
        ConfigError: no backend has this name.
    """
    if name == "auto":
        return _fastest(setup)
    if name not in _BACKENDS:
        raise ConfigError(
            f"--attention-backend {name!r} is unknown; choose auto or one of {', '.join(_BACKENDS)}."
        )
    return name


def _fastest(setup: AttentionSetup) -> str:
    if setup.device.torch_device.type == "cuda":
        reason = why_not(setup)
        if reason is None:
            return "flashinfer"
        log.warning("Attention is computed by plain torch, and slow: FlashInfer can't, %s.", reason)
    elif available() and setup.kv_dtype in CPU_CACHE_DTYPES:
        return "cpu"
    return "torch_reference"


def make_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """A backend for one worker, by its name or ``auto``.

    Raises:
        ConfigError: no backend has this name, or it can't serve the model on this device.
    """
    return _BACKENDS[resolve_backend(name, setup)](setup)
