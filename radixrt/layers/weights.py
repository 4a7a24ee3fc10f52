"""Copies the tensors of a checkpoint, in part or whole, into the memory of the layers."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError

_LISTED = 5
"""How many names an error message lists."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor on this rank."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, as the checkpoint has it."""
    target: Tensor
    """A view into a parameter: this rank's part."""
    dim: int = 0
    """The dimension of which a rank keeps a part."""
    start: int = 0
    """First index of this rank's part in ``dim``."""
    convert: Callable[[Tensor], Tensor] | None = None
    """Converts the whole tensor from the checkpoint's layout to that of ``target``; None: they are
    the same."""
    weights_an_element: int | Fraction = 1
    """Weights of the model that one element holds: 8 for a word of 4-bit codes, 0 for a scale."""
    count: int | None = None
    """Length of this rank's part in ``dim``; None: that of ``target``."""
    store: Callable[[Tensor], None] | None = None
    """Stores this rank's part; None: it is copied into ``target``."""
    held: bool = True
    """False: the tensor belongs to other ranks, and is not read."""

    def load(self, tensor: Tensor) -> None:
        """Take this rank's part of ``tensor`` (of shape ``shape``, any dtype, any device)."""
        if not self.held:
            return
        if self.convert is not None:
            tensor = self.convert(tensor)
        count = self.target.shape[self.dim] if self.count is None else self.count
        (self.store or self.target.copy_)(tensor.narrow(self.dim, self.start, count))


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter, of torch's current default dtype and device."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """The slot of every tensor that a checkpoint of the model must hold, by name.

    A layer with a method ``weight_slots(path)``, given its own path in the model, maps the
    checkpoint's tensors to its parameters, and to those of its parts, by itself.
    """
    return dict(_slots_below(model, ""))


def _slots_below(module: nn.Module, path: str) -> Iterator[tuple[str, WeightSlot]]:
    if (own := getattr(module, "weight_slots", None)) is not None:
        yield from own(path)
        return
    prefix = f"{path}." if path else ""
    for name, weight in module.named_parameters(recurse=False):
        yield prefix + name, WeightSlot(tuple(weight.shape), weight)
    for name, child in module.named_children():
        yield from _slots_below(child, prefix + name)


def num_weights(model: nn.Module) -> int:
    """Number of weights of the whole model, of which this rank may hold a part."""
    slots = weight_slots(model).values()
    return int(sum(math.prod(slot.shape) * slot.weights_an_element for slot in slots))


def weight_bytes(model: nn.Module) -> int:
    """Memory of this rank's weights in bytes."""
    return sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())


def load_into(
    slots: dict[str, WeightSlot], tensors: Iterable[tuple[str, Tensor]], ignored: set[str]
) -> None:
    """Copy ``tensors`` into their slots, one at a time.

    Args:
        tensors: the checkpoint's, under the names the slots have. Rotary tables, which old
            checkpoints store and every implementation recomputes, are passed over.
        ignored: other names that may occur and are passed over.

    Raises:
        ConfigError: tensors are missing, unexpected or misshapen; names some of them.
    """
    missing, unexpected, misshapen = set(slots), [], []
    for name, tensor in tensors:
        slot = slots.get(name)
        if slot is None:
            if name not in ignored and not name.endswith("rotary_emb.inv_freq"):
                unexpected.append(name)
            continue
        missing.discard(name)
        if tuple(tensor.shape) != slot.shape:
            misshapen.append(f"{name} is {list(tensor.shape)}, expected {list(slot.shape)}")
        else:
            slot.load(tensor)
    problems = [
        f"{len(names)} {what} ({'; '.join(names[:_LISTED])}{'; ...' if len(names) > _LISTED else ''})"
        for what, names in [
            ("missing", sorted(missing)),
            ("unexpected", unexpected),
            ("misshapen", misshapen),
        ]
        if names
    ]
    if problems:
        raise ConfigError(
            f"The checkpoint's tensors do not fit its config.json: {', '.join(problems)}."
        )
