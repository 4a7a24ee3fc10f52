"""Attention backends by name: the values of ``--attention-backend`` and what each stands for."""

from collections.abc import Callable

import torch

from radixrt.attention.backend import AttentionBackend
from radixrt.attention.cpu import CpuBackend
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.errors import ConfigError
from radixrt_kernels import available

_BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "cpu": CpuBackend,
    "torch_reference": lambda device: TorchReferenceBackend(),
}


def resolve_backend(name: str, device: torch.device | str) -> str:
    """What a value of ``--attention-backend`` means on a device: ``auto`` is the fastest that runs there.

    Raises:
        ConfigError: no backend has this name.
    """
    if name == "auto":
        return "cpu" if torch.device(device).type == "cpu" and available() else "torch_reference"
    if name not in _BACKENDS:
        raise ConfigError(
            f"--attention-backend {name!r} is unknown; choose auto or one of {', '.join(_BACKENDS)}."
        )
    return name


def make_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """A backend for one worker, by its name or ``auto``.

    Raises:
        ConfigError: no backend has this name.
    """
    return _BACKENDS[resolve_backend(name, device)](torch.device(device))
