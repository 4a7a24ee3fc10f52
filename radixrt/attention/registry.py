"""Attention backends by name: the values of ``--attention-backend`` and what each stands for."""

from collections.abc import Callable

import torch

from radixrt.attention.backend import AttentionBackend
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.errors import ConfigError

_BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "torch_reference": lambda device: TorchReferenceBackend(),
}


def resolve_backend(name: str, device: torch.device | str) -> str:
    """What a value of ``--attention-backend`` means on a device: ``auto`` is the fastest that runs there.

    Raises:
        ConfigError: no backend has this name.
    """
    if name == "auto":
        return "torch_reference"
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
