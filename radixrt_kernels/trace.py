"""Traces a computation as a list of kernel calls, and merges traces of two numbers of rows
into one for any number.

No kernel runs in a trace. What differs between two traces has to be proportional to the number of
rows (shapes, strides, offsets, other integers), and what is the same in both is taken for constant.
A branch for many rows alone would not be noticed.

Kernels are called through :func:`call`, which records them. ``__torch_dispatch__`` records torch's
own operations.
"""

import operator
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

TRACED_ROWS = (7, 11)
"""Few, because all intermediate tensors of a trace are in memory; primes, so that sizes of blocks
are not proportional to them."""

_LOOKS_AT_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_recorder: "ContextVar[_Recorder | None]" = ContextVar("_recorder", default=None)
"""That of the trace in this thread."""


class NotRecordable(Exception):
    """The computation depends on tensor values, or in another way on the number of rows, so a
    replay of its calls could be wrong."""


def call(kernel: Callable[..., None], *arguments: Any) -> None:
    """Call a kernel that writes into some of its arguments. In a trace, note the call instead."""
    recorder = _recorder.get()
    if recorder is None:
        kernel(*arguments)
    else:
        recorder.calls.append((kernel, arguments, {}))


class PerRow(NamedTuple):
    """An integer that is proportional to the number of rows."""

    per_row: int


Count = int | PerRow


def at(count: Count, rows: int) -> int:
    return count.per_row * rows if isinstance(count, PerRow) else count


def _merged(first: int, second: int) -> Count:
    """An integer of both traces."""
    if first == second:
        return first
    per_row = first // TRACED_ROWS[0]
    if (first, second) != tuple(per_row * rows for rows in TRACED_ROWS):
        raise NotRecordable(f"{first} and {second}, for {TRACED_ROWS} rows, are not in proportion")
    return PerRow(per_row)


class Form(NamedTuple):
    """That of a tensor in memory, in elements."""

    dtype: torch.dtype
    shape: tuple[Count, ...]
    stride: tuple[Count, ...]
    offset: Count

    @staticmethod
    def of(tensor: torch.Tensor) -> "Form":
        return Form(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def merged(self, other: "Form") -> "Form":
        if (self.dtype, len(self.shape)) != (other.dtype, len(other.shape)):
            raise NotRecordable("a tensor has another form for another number of rows")

        def all_merged(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[Count, ...]:
            return tuple(map(_merged, ours, theirs))

        shape, stride = all_merged(self.shape, other.shape), all_merged(self.stride, other.stride)
        return Form(self.dtype, shape, stride, *all_merged([self.offset], [other.offset]))

    def at(self, rows: int) -> "Form":
        shape, stride = (tuple(at(n, rows) for n in ns) for ns in (self.shape, self.stride))
        return Form(self.dtype, shape, stride, at(self.offset, rows))

    def tensor(self, memory: torch.Tensor, place: int) -> torch.Tensor:
        """With the counts of a certain number of rows: the tensor in the memory that begins at byte
        ``place`` of ``memory``."""
        typed: Any = memory.view(self.dtype)
        tensor: torch.Tensor = typed.as_strided(
            self.shape, self.stride, place // typed.itemsize + self.offset
        )
        return tensor


class Own(NamedTuple):
    """A tensor in memory that is allocated in the computation."""

    life: int
    """Index of the memory."""
    form: Form

    def merged(self, other: "Own") -> "Own":
        if self.life != other.life:
            raise NotRecordable("a tensor has another place for another number of rows")
        return Own(self.life, self.form.merged(other.form))


class Tree(NamedTuple):
    """Arguments or results as ``(args, kwargs)``: nested, with an :class:`Own` in place of each
    own tensor."""

    leaves: list[Any]
    spec: TreeSpec
    is_flat: bool
    """There are no kwargs, and the leaves are the args."""

    @staticmethod
    def of(leaf_of: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> "Tree":
        leaves, spec = tree_flatten((tuple(args), kwargs))
        is_flat = not kwargs and len(leaves) == len(args) and all(map(operator.is_, leaves, args))
        return Tree(list(map(leaf_of, leaves)), spec, is_flat)

    def merged(self, other: "Tree") -> "Tree":
        if self.spec != other.spec:
            raise NotRecordable("a kernel has other arguments for other numbers of rows")
        leaves = [_merged_leaf(a, b) for a, b in zip(self.leaves, other.leaves, strict=True)]
        return self._replace(leaves=leaves)

    def map(self, value: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
        """The args and kwargs with ``value`` of each leaf."""
        values = tuple(map(value, self.leaves))
        if self.is_flat:
            return values, {}
        args, kwargs = tree_unflatten(values, self.spec)
        return args, kwargs


def _merged_leaf(first: Any, second: Any) -> Any:
    if isinstance(first, Own) and isinstance(second, Own):
        return first.merged(second)
    if type(first) is int and type(second) is int:
        return _merged(first, second)
    if not (_is_same_tensor(first, second) if isinstance(first, torch.Tensor) else first == second):
        raise NotRecordable(f"an argument depends on the number of rows: {type(first).__name__}")
    return first


def _is_same_tensor(first: torch.Tensor, second: Any) -> bool:
    """Whether tensors in other memory than that of the computation are the same, such as weights,
    or are constants that it makes."""
    if first is second:
        return True
    if (
        not isinstance(second, torch.Tensor)
        or first.dtype != second.dtype
        or first.shape != second.shape
    ):
        return False
    is_same_view = first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
    return is_same_view or torch.equal(first, second)


class Life(NamedTuple):
    """Lifetime of memory, as indices of calls: from its allocation to the last call that uses
    it."""

    num_bytes: Count
    first: int
    last: int

    def merged(self, other: "Life") -> "Life":
        if self[1:] != other[1:]:
            raise NotRecordable("memory is used in other calls for another number of rows")
        return self._replace(num_bytes=_merged(self.num_bytes, other.num_bytes))  # type: ignore[arg-type]


class Trace(NamedTuple):
    """The calls of a computation, and what they use."""

    kernels: list[Callable[..., Any]]
    arguments: list[Tree]
    """Of each call."""
    inputs: Tree
    output: Tree
    lives: list[Life]
    """Ordered by first use."""

    def merged(self, other: "Trace") -> "Trace":
        if self.kernels != other.kernels or len(self.lives) != len(other.lives):
            raise NotRecordable("other kernels are called for other numbers of rows")
        return Trace(
            self.kernels,
            [a.merged(b) for a, b in zip(self.arguments, other.arguments, strict=True)],
            self.inputs.merged(other.inputs),
            self.output.merged(other.output),
            [a.merged(b) for a, b in zip(self.lives, other.lives, strict=True)],
        )


def traced(compute: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Trace:
    """The calls of a computation, for any number of rows.

    Args:
        inputs: tensors [rows, ...] of any number of rows; zeros of these shapes and dtypes have to
            be valid inputs.

    Raises:
        NotRecordable: it reads values of tensors in Python, or depends on the number of rows other
            than in proportion.
    """
    first, second = (_trace_of(compute, inputs, rows) for rows in TRACED_ROWS)
    return first.merged(second)


def _trace_of(compute: Callable[..., Any], inputs: Sequence[torch.Tensor], rows: int) -> Trace:
    zeros = [tensor.new_zeros((rows, *tensor.shape[1:])) for tensor in inputs]
    recorder = _Recorder(zeros)
    token = _recorder.set(recorder)
    try:
        with recorder:
            output = compute(*zeros)
    finally:
        _recorder.reset(token)
    return recorder.found(output)


class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]] = []
        self._inputs = inputs
        self._lives: dict[int, int] = {}
        """Indices of the memory that is allocated in the trace, by address."""
        self._kept: list[torch.Tensor] = []
        """A tensor for each life, in memory so that no address is used twice."""
        self._first: list[int] = []
        for tensor in inputs:
            self._allocated(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because a trace is never compiled. The default would import torch's
        compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _depends_on_values(func, args):
            raise NotRecordable(f"{func} depends on values")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if result is not None and not tensors_in(result):
            raise NotRecordable(f"{func} depends on values, or may")
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs))
            return result
        known = {_address(t) for t in tensors_in((args, kwargs))}
        fresh = [t for t in tensors_in(result) if _address(t) not in known]
        for tensor in fresh:
            self._allocated(tensor)
        if func.__name__.startswith(("empty", "new_empty")):
            for tensor in fresh:
                tensor.zero_()  # no kernel writes it, and it may have indices
        elif fresh:
            self.calls.append((_Again(func), (result, *args), kwargs))
        return result

    def _allocated(self, tensor: torch.Tensor) -> None:
        self._lives[_address(tensor)] = len(self._kept)
        self._kept.append(tensor)
        self._first.append(len(self.calls))

    def found(self, output: Any) -> Trace:
        last = list(self._first)
        for index, (_, args, kwargs) in enumerate(self.calls):
            self._note_uses(last, index, (args, kwargs))
        self._note_uses(last, len(self.calls), output)
        sizes = [tensor.untyped_storage().nbytes() for tensor in self._kept]
        return Trace(
            kernels=[kernel for kernel, _, _ in self.calls],
            arguments=[Tree.of(self._leaf, args, kwargs) for _, args, kwargs in self.calls],
            inputs=Tree.of(self._leaf, self._inputs, {}),
            output=Tree.of(self._leaf, (output,), {}),
            lives=list(map(Life, sizes, self._first, last)),
        )

    def _note_uses(self, last: list[int], index: int, values: Any) -> None:
        for tensor in tensors_in(values):
            if (life := self._lives.get(_address(tensor))) is not None:
                last[life] = index

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (life := self._lives.get(_address(leaf))) is None:
            return leaf
        return Own(life, Form.of(leaf))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    return not _LOOKS_AT_VALUES.isdisjoint(func.tags)


@dataclass(frozen=True)
class _Again:
    """An operation of torch that copies its results to the tensors of the tape."""

    func: Any

    def __call__(self, places: Any, *args: Any, **kwargs: Any) -> None:
        results = tensors_in(self.func(*args, **kwargs))
        for place, result in zip(tensors_in(places), results, strict=True):
            place.copy_(result)

    @property
    def __name__(self) -> str:
        return str(self.func)
