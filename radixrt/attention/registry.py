"""Attention backends by name: the values of ``--attention-backend``."""

import logging
from collections.abc import Callable

from radixrt.attention import cpu, flashinfer
from radixrt.attention.backend import AttentionBackend, AttentionSetup
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.base.errors import ConfigError

log = logging.getLogger(__name__)


_BACKENDS: dict[str, Callable[[AttentionSetup], AttentionBackend]] = {
    "cpu": cpu.CpuBackend,
    "flashinfer": flashinfer.make_flashinfer,
    "torch_reference": TorchReferenceBackend,
}


def resolve_backend(name: str, setup: AttentionSetup) -> str:
    """The name of a backend for a value of ``--attention-backend``: ``auto`` is the fastest that
    can serve the model.

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
        name, reason = "flashinfer", flashinfer.why_not(setup)
    else:
        name, reason = "cpu", cpu.why_not(setup)
    if reason is None:
        return name
    log.warning("PyTorch computes attention, which is slow; backend %s can't: %s.", name, reason)
    return "torch_reference"


def make_backend(name: str, setup: AttentionSetup) -> AttentionBackend:
    """A backend for one worker, by its name or ``auto``.

    Raises:
        ConfigError: no backend has this name, or it can't serve the model on this device.
    """
    return _BACKENDS[resolve_backend(name, setup)](setup)
