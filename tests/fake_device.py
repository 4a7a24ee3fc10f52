"""A GPU without a GPU: a queue that the host is always ahead of, and tensors that notice when the
host reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

from radixrt.device.device import DeviceEvent, pack, unpack

Made = TypeVar("Made")

READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
         "is_nonzero", "equal", "allclose", "masked_select", "unique", "__array__")  # fmt: skip
"""Functions of a tensor whose answer the host has to wait for."""


class OnDevice(torch.Tensor):
    """A tensor of the device. What is computed from it is one too."""

    device_of: "FakeDevice | None" = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        if name in READS or (name == "to" and _goes_to_host(arguments)):
            FakeDevice.reads.append(name)
        if name == "__getitem__" and _is_mask(arguments[1]):
            FakeDevice.reads.append("index by a mask")
        return super().__torch_function__(function, types, arguments, options or {})


def _goes_to_host(arguments: tuple[Any, ...]) -> bool:
    return any(str(part) == "cpu" for part in arguments if isinstance(part, str | torch.device))


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in parts)


@dataclass
class FakeEvent:
    device: "FakeDevice"
    place: int

    def is_past(self) -> bool:
        return self.device.done >= self.place

    def wait(self) -> None:
        self.device.wait_for(self.place, "mark")

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, FakeEvent)
        assert earlier.is_past() and self.is_past(), "the device does not know yet"
        return 1e-3 * (self.place - earlier.place)


@dataclass
class FakeDownload:
    mark: FakeEvent
    tensors: list[torch.Tensor]

    def is_ready(self) -> bool:
        return self.mark.is_past()

    def wait(self) -> list[torch.Tensor]:
        self.mark.device.wait_for(self.mark.place, "download")
        return self.tensors


@dataclass
class FakeDevice:
    """Orders are counted. What is slow is not done until the host waits for it or for what comes
    after it.

    Attributes:
        waits: what each wait was for that was not over at once, and how many slow orders were
            behind it.
        reads: how the host has read tensors of the device by itself.
        replays: of graphs.
    """

    has_graphs: bool = True
    overlaps: bool = True
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ordered: int = 0
    done: int = 0
    waits: list[tuple[str, int]] = field(default_factory=list)
    replays: int = 0
    slow: list[int] = field(default_factory=list)

    reads = []  # noqa: RUF012 (of the class: tensors don't know their device)

    def _order(self) -> int:
        """Something quick: done at once if nothing slow is ahead of it."""
        if self.done == self.ordered:
            self.done += 1
        self.ordered += 1
        return self.ordered

    def wait_for(self, place: int, what: str) -> None:
        if place > self.done:
            behind = [order for order in self.slow if order > place]
            self.waits.append((what, len(behind)))
            self.done = min(behind, default=self.ordered + 1) - 1

    def compute(self) -> None:
        """Order something slow: the layers of a model."""
        self.ordered += 1
        self.slow.append(self.ordered)

    def upload(self, *arrays: NDArray) -> list[torch.Tensor]:
        if not arrays:
            return []
        buffer = pack(arrays, lambda size: torch.empty(size, dtype=torch.uint8))
        for array in arrays:  # the host may not touch them again
            if array.flags.owndata and array.flags.writeable:
                array.flags.writeable = False
        return [tensor.as_subclass(OnDevice) for tensor in unpack(buffer, arrays)]

    def pin(self, *arrays: NDArray) -> list[torch.Tensor]:
        return unpack(pack(arrays, lambda size: torch.empty(size, dtype=torch.uint8)), arrays)

    def download(self, tensors: Sequence[torch.Tensor]) -> FakeDownload:
        plain = [tensor.as_subclass(torch.Tensor).clone() for tensor in tensors]
        return FakeDownload(FakeEvent(self, self._order()), plain)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, self._order())

    def capture(self, work: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        made = work()
        assert isinstance(made, torch.Tensor)

        def replay() -> None:
            self.replays += 1
            self._order()
            made.copy_(work())

        return replay, made.as_subclass(OnDevice)  # type: ignore[return-value]
