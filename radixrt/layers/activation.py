"""The activations of gated MLPs, by the names that checkpoints give them."""

from radixrt.base.errors import ConfigError

_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
}


def gated_activation(hidden_act: str) -> str:
    """The kernel's name for a config's ``hidden_act``.

    Raises:
        ConfigError: the activation is not one that gated MLPs use here.
    """
    if hidden_act not in _NAMES:
        raise ConfigError(
            f"The checkpoint's activation {hidden_act!r} is not supported; supported: {', '.join(_NAMES)}."
        )
    return _NAMES[hidden_act]
