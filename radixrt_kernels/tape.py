"""Records a forward pass as a list of kernel calls, and replays it without the model's Python.

A decode step of 24 layers has some two hundred kernel calls of a few to some hundred microseconds. At small batches, the
modules, views and allocations between them take the same time again. A tape records the calls of one run with their
arguments, as a CUDA graph does on a GPU. For the next step of the same shape, the inputs are copied to the recorded tensors
and the calls are repeated.

Kernels are called through :func:`call`, which records them. ``__torch_dispatch__`` records torch's own operations.
Intermediate tensors are in one block of memory. Tensors with disjoint lifetimes share memory, so the working set is as
small as with an allocator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ALIGNMENT = 64
"""Of intermediate tensors, in bytes."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]

_LOOKS_AT_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_recording: "_Recording | None" = None


class NotRecordable(Exception):
    """The computation depends on tensor values, so a replay of its calls could be wrong."""


def call(kernel: Callable[..., None], *arguments: Any) -> None:
    """Call a kernel that writes into some of its arguments; record the call if a recording is active."""
    kernel(*arguments)
    if _recording is not None:
        _recording.calls.append((kernel, arguments))


@dataclass(frozen=True, slots=True)
class Tape:
    """The recorded calls of one computation."""

    inputs: list[torch.Tensor]
    """The tensors to which :meth:`replay` copies its arguments."""
    output: Any
    """A tensor, or tensors."""
    calls: list[Call]
    num_bytes: int
    """Memory of the intermediate tensors, in bytes."""
    recorded_bytes: int
    """The same during the recording, when none shared memory."""

    def replay(self, *inputs: torch.Tensor) -> Any:
        """Compute on inputs of the recorded shapes. The next replay overwrites the result."""
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        for kernel, arguments in self.calls:
            kernel(*arguments)
        return self.output


def record(
    compute: Callable[..., Any], *inputs: torch.Tensor, memory: torch.Tensor | None = None
) -> tuple[Tape, Any]:
    """Run ``compute(*inputs)`` once and record it. Return the tape and the result.

    Args:
        compute: its result, a tensor or a tuple of tensors, may depend only on the inputs and on memory that its kernels read (such
            as a KV cache). It may change only tensors that it allocates, and memory that its kernels write.
        inputs: tensors; a replay needs the same shapes and dtypes
        memory: [bytes] uint8 for the intermediate tensors, which several tapes may share: then a replay of one overwrites the
            results of all. If it is None or too small, the tape has memory of its own.

    Raises:
        NotRecordable: ``compute`` reads values of tensors in Python.
    """
    global _recording
    recording = _Recording([tensor.clone() for tensor in inputs])
    _recording = recording
    try:
        with recording:
            output = compute(*recording.inputs)
    finally:
        _recording = None
    return recording.tape(output, memory), output


@dataclass(slots=True)
class _Life:
    """Lifetime of a tensor's memory, as indices of calls: from its allocation to the last call that uses it."""

    num_bytes: int
    first: int
    last: int
    place: int = -1


class _Recording(TorchDispatchMode):
    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.inputs = inputs
        self.calls: list[Call] = []
        self._own: dict[int, _Life] = {}
        """Lifetimes by the address of a storage allocated during the recording."""
        self._kept: list[torch.Tensor] = []
        """References that keep every storage alive, so that no address is used twice."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because a recording is never compiled. The default would import torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _depends_on_values(func, args):
            raise NotRecordable(f"{func} depends on values")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if result is not None and not _tensors(result):
            raise NotRecordable(f"{func} depends on values, or may")
        if func._schema.is_mutable:
            self.calls.append(
                (func, (*args,)) if not kwargs else (_with_names(func, kwargs), (*args,))
            )
            return result
        known = {_address(t) for t in _tensors((args, kwargs))}
        fresh = [t for t in _tensors(result) if _address(t) not in known]
        for tensor in fresh:
            self._kept.append(tensor)
            num_bytes = tensor.untyped_storage().nbytes()
            self._own[_address(tensor)] = _Life(num_bytes, len(self.calls), len(self.calls))
        if fresh and not func.__name__.startswith(("empty", "new_empty")):
            self.calls.append((_again(func, kwargs), (result, *args)))
        return result

    def tape(self, output: Any, shared: torch.Tensor | None) -> Tape:
        self._see_uses(output)
        num_bytes = _assign_places(list(self._own.values()))
        if shared is not None and num_bytes <= len(shared):
            memory = shared
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8)

        def moved(value: Any) -> Any:
            return self._moved(value, memory) if isinstance(value, torch.Tensor) else value

        calls = [
            (kernel, tuple(tree_map(moved, argument) for argument in arguments))
            for kernel, arguments in self.calls
        ]
        recorded_bytes = sum(life.num_bytes for life in self._own.values())
        return Tape(self.inputs, tree_map(moved, output), calls, num_bytes, recorded_bytes)

    def _see_uses(self, output: Any) -> None:
        for index, (_, arguments) in enumerate(self.calls):
            for tensor in _tensors(arguments):
                if life := self._own.get(_address(tensor)):
                    life.last = index
        for tensor in _tensors(output):
            if life := self._own.get(_address(tensor)):
                life.last = len(self.calls)

    def _moved(self, tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        life = self._own.get(_address(tensor))
        if life is None:
            return tensor
        size = life.num_bytes // tensor.itemsize * tensor.itemsize
        storage = memory[life.place : life.place + size].view(tensor.dtype)
        return storage.as_strided(
            tensor.shape, tensor.stride(), storage.storage_offset() + tensor.storage_offset()
        )


def _assign_places(lives: list[_Life]) -> int:
    """Assign each memory block the lowest offset that is free during its lifetime. Return the total size in bytes."""
    end = 0
    placed: list[_Life] = []
    for life in lives:  # ordered by first use
        place = 0
        for other in sorted(placed, key=lambda other: other.place):
            if other.last < life.first:
                continue
            if place + life.num_bytes <= other.place:
                break
            place = max(place, _rounded_up(other.place + other.num_bytes))
        life.place = place
        placed = [other for other in placed if other.last >= life.first]
        placed.append(life)
        end = max(end, _rounded_up(place + life.num_bytes))
    return end


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    return not _LOOKS_AT_VALUES.isdisjoint(func.tags)


def _with_names(func: Any, kwargs: dict[str, Any]) -> Callable[..., Any]:
    return lambda *args: func(*args, **kwargs)


def _again(func: Any, kwargs: dict[str, Any]) -> Callable[..., None]:
    """Wrap an operation of torch so that it copies its results to the tensors of the recording."""

    def compute(places: Any, *args: Any) -> None:
        results = _tensors(func(*args, **kwargs))
        for place, result in zip(_tensors(places), results, strict=True):
            place.copy_(result)

    return compute
