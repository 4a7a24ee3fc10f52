"""Where the tensors of a checkpoint go: each is copied, in part or whole, into memory a layer owns."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from radixrt.base.errors import ConfigError

_LISTED = 5
"""How many names an error message lists."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor on this rank."""

    shape: tuple[int, ...]
    """Of the whole tensor, as the checkpoint has it."""
    target: Tensor
    """A view into a parameter: this rank's part."""
    dim: int = 0
    """The dimension of which a rank keeps a part."""
    start: int = 0
    """Where in ``dim`` this rank's part begins."""
    convert: Callable[[Tensor], Tensor] | None = None
    """From the whole tensor as the checkpoint has it to the whole as ``target`` has it, where they differ."""
    weights_an_element: int = 1
    """How many of the model's weights one element stands for; 0 for what only describes others."""
    count: int | None = None
    """This rank's part of ``dim``; None: as much as ``target`` has."""
    store: Callable[[Tensor], None] | None = None
    """Takes this rank's part where it is not simply copied into ``target``."""

    def load(self, tensor: Tensor) -> None:
        """Take this rank's part of ``tensor`` (of shape ``shape``, any dtype, any device)."""
        if self.convert is not None:
            tensor = self.convert(tensor)
        count = self.target.shape[self.dim] if self.count is None else self.count
        (self.store or self.target.copy_)(tensor.narrow(self.dim, self.start, count))


@runtime_checkable
class HasWeightSlots(Protocol):
    """A layer whose parameters, those of its parts included, are not simply the checkpoint's tensors."""

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """Checkpoint names, given the layer's own path in the model, and their slots."""


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter, of torch's current default dtype and device."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Every tensor that a checkpoint of the model must hold, by name."""
    return dict(_slots_below(model, ""))


def _slots_below(module: nn.Module, path: str) -> Iterator[tuple[str, WeightSlot]]:
    if isinstance(module, HasWeightSlots):
        yield from module.weight_slots(path)
        return
    prefix = f"{path}." if path else ""
    for name, weight in module.named_parameters(recurse=False):
        yield prefix + name, WeightSlot(tuple(weight.shape), weight)
    for name, child in module.named_children():
        yield from _slots_below(child, prefix + name)


def num_weights(model: nn.Module) -> int:
    """How many numbers the whole model has, of which this rank may hold a part."""
    slots = weight_slots(model).values()
    return sum(math.prod(slot.shape) * slot.weights_an_element for slot in slots)


def weight_bytes(model: nn.Module) -> int:
    """Memory of this rank's weights, in the form in which they are kept."""
    return sum(tensor.numel() * tensor.itemsize for tensor in model.state_dict().values())


def load_into(
    slots: dict[str, WeightSlot], tensors: Iterable[tuple[str, Tensor]], ignored: set[str]
) -> None:
    """Copy ``tensors`` into their slots, one at a time.

    Args:
        slots: of the whole model.
        tensors: the checkpoint's, under the names the slots have. Rotary tables, which old
            checkpoints store and every implementation recomputes, are passed over.
        ignored: other names that may occur and mean nothing.

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
