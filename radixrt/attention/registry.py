"""Attention backends by name: the values of ``--attention-backend`` and what each stands for."""

from collections.abc import Callable

import torch

from radixrt.attention.backend import AttentionBackend
from radixrt.attention.torch_reference import TorchReferenceBackend
from radixrt.errors import ConfigError

_BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "torch_reference": lambda device: TorchReferenceBackend(),
}


def make_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """A backend for one worker.

    Args:
        name: a key of the registry, or ``auto`` for the fastest that runs on the device.

    Raises:
        ConfigError: no backend has this name.
    """
    if name == "auto":
        name = "torch_reference"
    if name not in _BACKENDS:
        raise ConfigError(
            f"--attention-backend {name!r} is unknown; choose auto or one of {', '.join(_BACKENDS)}."
        )
    return _BACKENDS[name](torch.device(device))
