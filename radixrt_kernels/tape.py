"""Records a forward pass as a list of kernel calls, and replays it for any number of rows, without
the model's Python.

A step of 24 layers has some two hundred kernel calls of a few to some hundred microseconds. At
small batches, the modules, views and allocations between them take the same time again; in steps
with prompts, tensors that are allocated anew for each layer leave the caches. A tape has the calls
of one computation with their arguments, as a CUDA graph does on a GPU. For a step, the inputs are
copied to the tensors of the tape and the calls are repeated.

The calls are known for any number of rows (:mod:`radixrt_kernels.trace`). A branch for many rows
alone would not be noticed: kernels choose their ways inside. With ``RADIXRT_CHECK_TAPES=1`` in the
environment, as in the tests, the first replay of each tape is compared with the computation.

Intermediate tensors are in one block of memory. Tensors with disjoint lifetimes share memory, so
the working set is as small as with an allocator.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from radixrt_kernels.trace import Form, Life, Own, PerRow, Tree, at, tensors_in, traced

ALIGNMENT = 64
"""Of intermediate tensors, in bytes."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]

CHECKS = os.environ.get("RADIXRT_CHECK_TAPES", "0") not in ("", "0")
"""The first replay of each tape is compared with the computation that was traced."""


class TapeDiffers(Exception):
    """A replay computed something else than the traced computation."""


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
        expected = [_bits(tensor) for tensor in tensors_in(self.check(*inputs))]
        self.check = None
        output = self._run(inputs)
        if not all(map(torch.equal, expected, map(_bits, tensors_in(output)))):
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
        trace = traced(compute, inputs)
        self._kernels, self._lives = trace.kernels, trace.lives
        self._forms: dict[Form, int] = {}
        """Those of all tensors, numbered."""
        self._inputs, self._output = self._numbered(trace.inputs), self._numbered(trace.output)
        self._arguments = list(map(self._numbered, trace.arguments))

    def _numbered(self, tree: Tree) -> Tree:
        """The tree with a :class:`_Place` for each :class:`Own`."""

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, Own):
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
            if kind is PerRow:
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


class _Place(NamedTuple):
    """A tensor of the computation: the index of its memory, and the number of its form."""

    life: int
    form: int


def _assign_places(lives: list[Life], rows: int) -> tuple[list[int], int]:
    """Assign each memory the lowest offset that is free during its lifetime. Returns the offsets,
    and the total size in bytes."""
    end = 0
    places: list[int] = []
    alive: list[tuple[int, int, int]] = []
    """Of memory that is still used: its offset, its end, the last call that uses it."""
    for life in lives:
        size = _rounded_up(at(life.num_bytes, rows))
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor as bytes, in which each NaN equals itself."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(torch.uint8)
