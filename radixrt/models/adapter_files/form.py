"""An adapter as a file has it, before its projections are looked for in a model."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.lora import LowRank

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class AdapterError(ConfigError):
    """An adapter cannot be served."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """What was read of an adapter."""

    digest: str
    """SHA-256 of all that its answers depend on: tensors, and what their scalings are made of."""
    modules: Sequence[Mapping[str, LowRank]]
    """Each pair of matrices, with its scaling, by the checkpoint's name of its weight; by several
    names where the file does not tell to which of them it belongs. The pairs of all experts are
    one: [experts, rank, input features] and [experts, output features, rank]."""
    invocation: tuple[int, ...] = ()
    """The tokens that invoke an activated adapter; empty: it is none."""


def invocation_of(tokens: Any) -> tuple[int, ...]:
    """The invocation of an activated adapter, as its file has it.

    >>> invocation_of([5, 6]), invocation_of(None)
    ((5, 6), ())

    Raises:
        AdapterError: it is no list of tokens. The scheduler could not look for it in prompts.
    """
    try:
        return msgspec.convert(tokens or (), tuple[_Token, ...])
    except msgspec.ValidationError as error:
        raise AdapterError(f"its alora_invocation_tokens are no list of tokens: {error}") from error


def digest_of(settings: Any, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of tensors, and the settings that change what is
    computed."""
    digest = hashlib.sha256(msgspec.msgpack.encode(settings))
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(msgspec.msgpack.encode((name, str(tensor.dtype), list(tensor.shape))))
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
