"""Records a forward pass as a list of kernel calls, and replays it for any number of rows, without
the model's Python.

A step of 24 layers has some two hundred kernel calls of a few to some hundred microseconds. At
small batches, the modules, views and allocations between them take the same time again; in steps
with prompts, tensors that are allocated anew for each layer leave the caches. A tape has the calls
of one computation with their arguments, as a CUDA graph does on a GPU. For a step, the inputs are
copied to the tensors of the tape and the calls are repeated.

The computation is traced twice, with different numbers of rows, and no kernel runs in a trace. What
differs between the traces has to be proportional to the number of rows (shapes, strides, offsets,
other integers), and what is the same in both is taken for constant. So :class:`Tapes` knows the
calls for any number of rows. It would not notice a branch for many rows alone: kernels choose their
ways inside. With ``RADIXRT_CHECK_TAPES=1`` in the environment, as in the tests, the first replay of
each tape is compared with the computation.

Kernels are called through :func:`call`, which records them. ``__torch_dispatch__`` records torch's
own operations. Intermediate tensors are in one block of memory. Tensors with disjoint lifetimes
share memory, so the working set is as small as with an allocator.
"""

import functools
import operator
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

ALIGNMENT = 64
"""Of intermediate tensors, in bytes."""

TRACED_ROWS = (7, 11)
"""Few, because all intermediate tensors of a trace are in memory; primes, so that sizes of blocks
are not proportional to them."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]

_LOOKS_AT_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

CHECKS = os.environ.get("RADIXRT_CHECK_TAPES", "0") not in ("", "0")
"""The first replay of each tape is compared with the computation that was traced."""

_tracing: "ContextVar[_Trace | None]" = ContextVar("_tracing", default=None)
"""The trace of this thread."""


class NotRecordable(Exception):
    """The computation depends on tensor values, or in another way on the number of rows, so a
    replay of its calls could be wrong."""


class TapeDiffers(Exception):
    """A replay computed something else than the traced computation."""


def call(kernel: Callable[..., None], *arguments: Any) -> None:
    """Call a kernel that writes into some of its arguments. In a trace, note the call instead."""
    trace = _tracing.get()
    if trace is None:
        kernel(*arguments)
    else:
        trace.calls.append((kernel, arguments, {}))


@dataclass(slots=True)
class Tape:
    """The calls of one computation of a certain number of rows."""

    inputs: Sequence[torch.Tensor]
    """The tensors to which :meth:`replay` copies its arguments."""
    output: Any
    """A tensor, or tensors."""
    calls: list[Call]
    check: Callable[..., Any] | None = None
    """The computation, with which the next replay is compared; None: it is not compared."""

    def replay(self, *inputs: torch.Tensor) -> Any:
        """Compute on inputs of the tape's shapes. The next replay overwrites the result.

        Raises:
            TapeDiffers: the computation of :attr:`check` gives other bits.
        """
        if self.check is None:
            return self._run(inputs)
        expected = [_bits(tensor) for tensor in _tensors(self.check(*inputs))]
        self.check = None
        output = self._run(inputs)
        if not all(map(torch.equal, expected, map(_bits, _tensors(output)))):
            raise TapeDiffers(f"A tape of {len(inputs[0])} rows differs from its computation.")
        return output

    def _run(self, inputs: Sequence[torch.Tensor]) -> Any:
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor)
        for kernel, arguments in self.calls:
            kernel(*arguments)
        return self.output


class Tapes:
    """The tapes of one computation, for any number of rows.

    >>> def norm_and_double(rows: torch.Tensor) -> torch.Tensor:
    ...     return 2 * rows / rows.norm(dim=-1, keepdim=True)
    >>> tapes = Tapes(norm_and_double, torch.zeros(1, 2))
    >>> with torch.inference_mode():
    ...     tapes.of(2).replay(torch.tensor([[3.0, 4.0], [0.0, 5.0]]))
    tensor([[1.2000, 1.6000],
            [0.0000, 2.0000]])

    Args:
        compute: its result, a tensor or a tuple of tensors, may depend only on the inputs and on
            memory that its kernels read (such as a KV cache). It may change only tensors that it
            allocates, and memory that its kernels write.
        inputs: tensors [rows, ...] of any number of rows; zeros of these shapes and dtypes have to
            be valid inputs.
        checks: the first replay of each tape is compared with the computation, which runs before.
        check: the computation for that, which leaves memory as it was; None: ``compute``.

    Raises:
        NotRecordable: ``compute`` reads values of tensors in Python, or depends on the number of
            rows other than in proportion.
    """

    @torch.inference_mode()
    def __init__(
        self,
        compute: Callable[..., Any],
        *inputs: torch.Tensor,
        checks: bool = CHECKS,
        check: Callable[..., Any] | None = None,
    ) -> None:
        self._check = (check or compute) if checks else None
        first, second = (_trace_of(compute, inputs, rows) for rows in TRACED_ROWS)
        if first.kernels != second.kernels or len(first.lives) != len(second.lives):
            raise NotRecordable("other kernels are called for other numbers of rows")
        self._kernels = first.kernels
        self._forms: dict[_Form, int] = {}
        """Those of all tensors, numbered."""
        self._inputs, self._output = (
            self._numbered(a.merged(b))
            for a, b in ((first.inputs, second.inputs), (first.output, second.output))
        )
        self._arguments = [
            self._numbered(a.merged(b))
            for a, b in zip(first.arguments, second.arguments, strict=True)
        ]
        self._lives = [a.merged(b) for a, b in zip(first.lives, second.lives, strict=True)]

    def _numbered(self, tree: "_Tree") -> "_Tree":
        """The tree with a :class:`_Place` for each :class:`_Own`."""

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, _Own):
                return leaf
            return _Place(leaf.life, self._forms.setdefault(leaf.form, len(self._forms)))

        return tree._replace(leaves=list(map(place, tree.leaves)))

    def num_bytes(self, rows: int) -> int:
        """Memory of the intermediate tensors."""
        return _assign_places(self._lives, rows)[1]

    def of(self, rows: int, memory: torch.Tensor | None = None) -> Tape:
        """The tape for a number of rows.

        Args:
            memory: [bytes] uint8 for the intermediate tensors, which several tapes may share: then
                a replay of one overwrites the results of all. If it is None or too small, the tape
                has memory of its own.
        """
        places, num_bytes = _assign_places(self._lives, rows)
        if memory is None or len(memory) < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8)

        forms = [form.at(rows) for form in self._forms]
        tensors: dict[tuple[int, int], torch.Tensor] = {}

        def value(leaf: Any) -> Any:
            kind = type(leaf)
            if kind is _PerRow:
                return leaf.per_row * rows
            if kind is not _Place:
                return leaf
            key = places[leaf.life], leaf.form
            if (tensor := tensors.get(key)) is None:
                tensor = tensors[key] = forms[leaf.form].tensor(memory, places[leaf.life])
            return tensor

        calls = []
        for kernel, arguments in zip(self._kernels, self._arguments, strict=True):
            positional, named = arguments.map(value)
            calls.append((functools.partial(kernel, **named) if named else kernel, positional))
        return Tape(self._inputs.map(value)[0], self._output.map(value)[0][0], calls, self._check)


class _PerRow(NamedTuple):
    """An integer that is proportional to the number of rows."""

    per_row: int


_Count = int | _PerRow


def _at(count: _Count, rows: int) -> int:
    return count.per_row * rows if isinstance(count, _PerRow) else count


def _merged(first: int, second: int) -> _Count:
    """An integer of both traces."""
    if first == second:
        return first
    per_row = first // TRACED_ROWS[0]
    if (first, second) != tuple(per_row * rows for rows in TRACED_ROWS):
        raise NotRecordable(f"{first} and {second}, for {TRACED_ROWS} rows, are not in proportion")
    return _PerRow(per_row)


class _Form(NamedTuple):
    """That of a tensor in memory, in elements."""

    dtype: torch.dtype
    shape: tuple[_Count, ...]
    stride: tuple[_Count, ...]
    offset: _Count

    @staticmethod
    def of(tensor: torch.Tensor) -> "_Form":
        return _Form(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def merged(self, other: "_Form") -> "_Form":
        if (self.dtype, len(self.shape)) != (other.dtype, len(other.shape)):
            raise NotRecordable("a tensor has another form for another number of rows")

        def all_merged(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[_Count, ...]:
            return tuple(map(_merged, ours, theirs))

        shape, stride = all_merged(self.shape, other.shape), all_merged(self.stride, other.stride)
        return _Form(self.dtype, shape, stride, *all_merged([self.offset], [other.offset]))

    def at(self, rows: int) -> "_Form":
        shape, stride = (tuple(_at(n, rows) for n in ns) for ns in (self.shape, self.stride))
        return _Form(self.dtype, shape, stride, _at(self.offset, rows))

    def tensor(self, memory: torch.Tensor, place: int) -> torch.Tensor:
        """With the counts of a certain number of rows: the tensor in the memory that begins at byte
        ``place`` of ``memory``."""
        typed: Any = memory.view(self.dtype)
        tensor: torch.Tensor = typed.as_strided(
            self.shape, self.stride, place // typed.itemsize + self.offset
        )
        return tensor


class _Own(NamedTuple):
    """A tensor in memory that is allocated in the computation."""

    life: int
    """Index of the memory."""
    form: _Form

    def merged(self, other: "_Own") -> "_Own":
        if self.life != other.life:
            raise NotRecordable("a tensor has another place for another number of rows")
        return _Own(self.life, self.form.merged(other.form))


class _Place(NamedTuple):
    """The same, with the number of its form."""

    life: int
    form: int


class _Tree(NamedTuple):
    """Arguments or results as ``(args, kwargs)``: nested, with an :class:`_Own` in place of each
    own tensor."""

    leaves: list[Any]
    spec: TreeSpec
    is_flat: bool
    """There are no kwargs, and the leaves are the args."""

    @staticmethod
    def of(leaf_of: Callable[[Any], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> "_Tree":
        leaves, spec = tree_flatten((tuple(args), kwargs))
        is_flat = not kwargs and len(leaves) == len(args) and all(map(operator.is_, leaves, args))
        return _Tree(list(map(leaf_of, leaves)), spec, is_flat)

    def merged(self, other: "_Tree") -> "_Tree":
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
    if isinstance(first, _Own) and isinstance(second, _Own):
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


class _Life(NamedTuple):
    """Lifetime of memory, as indices of calls: from its allocation to the last call that uses
    it."""

    num_bytes: _Count
    first: int
    last: int

    def merged(self, other: "_Life") -> "_Life":
        if self[1:] != other[1:]:
            raise NotRecordable("memory is used in other calls for another number of rows")
        return self._replace(num_bytes=_merged(self.num_bytes, other.num_bytes))  # type: ignore[arg-type]


class _Calls(NamedTuple):
    """What a trace has found."""

    kernels: list[Callable[..., Any]]
    arguments: list[_Tree]
    """Of each call."""
    inputs: _Tree
    output: _Tree
    lives: list[_Life]
    """Ordered by first use."""


def _trace_of(compute: Callable[..., Any], inputs: Sequence[torch.Tensor], rows: int) -> _Calls:
    zeros = [tensor.new_zeros((rows, *tensor.shape[1:])) for tensor in inputs]
    trace = _Trace(zeros)
    token = _tracing.set(trace)
    try:
        with trace:
            output = compute(*zeros)
    finally:
        _tracing.reset(token)
    return trace.found(output)


class _Trace(TorchDispatchMode):
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
        if result is not None and not _tensors(result):
            raise NotRecordable(f"{func} depends on values, or may")
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs))
            return result
        known = {_address(t) for t in _tensors((args, kwargs))}
        fresh = [t for t in _tensors(result) if _address(t) not in known]
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

    def found(self, output: Any) -> _Calls:
        last = list(self._first)
        for index, (_, args, kwargs) in enumerate(self.calls):
            self._note_uses(last, index, (args, kwargs))
        self._note_uses(last, len(self.calls), output)
        sizes = [tensor.untyped_storage().nbytes() for tensor in self._kept]
        return _Calls(
            kernels=[kernel for kernel, _, _ in self.calls],
            arguments=[_Tree.of(self._leaf, args, kwargs) for _, args, kwargs in self.calls],
            inputs=_Tree.of(self._leaf, self._inputs, {}),
            output=_Tree.of(self._leaf, (output,), {}),
            lives=list(map(_Life, sizes, self._first, last)),
        )

    def _note_uses(self, last: list[int], index: int, values: Any) -> None:
        for tensor in _tensors(values):
            if (life := self._lives.get(_address(tensor))) is not None:
                last[life] = index

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (life := self._lives.get(_address(leaf))) is None:
            return leaf
        return _Own(life, _Form.of(leaf))


def _assign_places(lives: list[_Life], rows: int) -> tuple[list[int], int]:
    """Assign each memory the lowest offset that is free during its lifetime. Returns the offsets,
    and the total size in bytes."""
    end = 0
    places: list[int] = []
    alive: list[tuple[int, int, int]] = []
    """Of memory that is still used: its offset, its end, the last call that uses it."""
    for life in lives:
        size = _rounded_up(_at(life.num_bytes, rows))
        alive = [other for other in alive if other[2] >= life.first]
        place = 0
        for start, stop, _ in alive:
            if place + size <= start:
                break
            place = max(place, stop)
        alive.append((place, place + size, life.last))
        alive.sort()
        places.append(place)
        end = max(end, place + size)
    return places, end


def _rounded_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor as bytes, in which each NaN equals itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _depends_on_values(func: Any, args: Sequence[Any]) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    return not _LOOKS_AT_VALUES.isdisjoint(func.tags)


@dataclass(frozen=True)
class _Again:
    """An operation of torch that copies its results to the tensors of the tape."""

    func: Any

    def __call__(self, places: Any, *args: Any, **kwargs: Any) -> None:
        results = _tensors(self.func(*args, **kwargs))
        for place, result in zip(_tensors(places), results, strict=True):
            place.copy_(result)

    @property
    def __name__(self) -> str:
        return str(self.func)
