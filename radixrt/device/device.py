"""Copies between host and device, marks in the device's queue, and captured graphs: a GPU's, and
their trivial CPU forms; and the import of FlashInfer.

A GPU takes kernels into a queue and computes them by itself. It becomes idle when the host waits:
for a copy from memory that isn't pinned, or for a number that the GPU has yet to compute. So
everything that crosses goes through a :class:`Device`, in which only two operations wait: reading a
:class:`Download`, and :meth:`DeviceEvent.wait`.
"""

import contextlib
import inspect
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TRACING = ("FLASHINFER_LOGLEVEL", "FLASHINFER_TRACE_DUMP")
"""Environment variables by which a user asks FlashInfer to log or trace calls."""


def load_flashinfer() -> Any:
    """The package ``flashinfer``; the first call takes seconds, and makes a folder.

    Where nvidia-cutlass-dsl is installed, which pip brings along, FlashInfer would compile its
    norms by it for each shape when they are called. Its CUDA norms are one module, which can be
    compiled ahead, so they are preferred; ``FLASHINFER_USE_CUDA_NORM=0`` chooses the others.
    """
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # read when flashinfer is imported
    import flashinfer

    return flashinfer


class UntracedFunctions:
    """FlashInfer's functions without the decorator that reads the environment at each call, for
    logs and traces.

    This read takes longer than a launch, and an eager step has about 150 calls. If logs or traces
    are requested, the decorated functions are used.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._traced = any(os.environ.get(name, "0") not in ("", "0") for name in TRACING)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if not self._traced:
            function = inspect.unwrap(function)
        setattr(self, name, function)  # found without this method from now on
        return function


Made = TypeVar("Made")

ALIGNMENT = 16
"""Bytes; each array of an upload begins at a multiple, as kernels like it."""


class DeviceEvent:
    """A place in the device's queue. A CPU has passed it when it is made."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Let the host wait until everything queued before the event is done."""

    def seconds_since(self, earlier: Any) -> float:
        """Device time in seconds between two events that the device has passed."""
        return self._time - earlier._time


class Download:
    """Tensors on their way to the host. A CPU's are there."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.clone() for tensor in tensors]

    def is_ready(self) -> bool:
        """:meth:`wait` would not wait."""
        return True

    def wait(self) -> list[Tensor]:
        """The tensors, in the host's memory."""
        return self._tensors


class Device(Protocol):
    """One CPU or one GPU."""

    torch_device: torch.device
    overlaps: bool
    """It computes while the host goes on, so a step is launched before the tokens of the step ahead
    of it are back."""
    has_graphs: bool
    """:meth:`capture` works."""

    def upload(self, *arrays: NDArray) -> list[Tensor]:
        """Copies of ``arrays`` on the device, sent as one transfer. The host doesn't wait, and may
        not change the arrays afterwards."""

    def pin(self, *arrays: NDArray) -> list[Tensor]:
        """The arrays as pinned host tensors, from which the device copies without the host's
        help."""

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Begin to copy tensors to the host. The caller may drop them at once, but not write to
        them before they arrive."""

    def record_event(self) -> DeviceEvent:
        """Record an event at this place in the queue."""

    def capture(self, work: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        """Capture the kernels that ``work`` launches as a graph.

        Returns:
            a function that replays the graph, and the result of ``work``, whose tensors hold the
            results of every replay. All graphs share memory, so no two may run at once.
        """


def make_device(torch_device: torch.device) -> "Device":
    return CudaDevice(torch_device) if torch_device.type == "cuda" else CpuDevice()


# ---------------------------------------------------------------- CPU


class CpuDevice:
    """A CPU: every operation is done when it returns.

    Args:
        overlaps: let the worker overlap steps as on a GPU (for tests).
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.overlaps = overlaps
        self.has_graphs = False

    def upload(self, *arrays: NDArray) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def pin(self, *arrays: NDArray) -> list[Tensor]:
        return self.upload(*arrays)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        return Download(tensors)

    def record_event(self) -> DeviceEvent:
        return DeviceEvent()

    def capture(self, work: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        raise NotImplementedError("a CPU has no graphs")


CPU = CpuDevice()


# ---------------------------------------------------------------- packing


def pack(arrays: Sequence[NDArray], make_buffer: Callable[[int], Tensor]) -> Tensor:
    """Arrays one after the other in a host buffer, [bytes] uint8; each begins at a multiple of
    ``ALIGNMENT``.

    >>> arrays = [np.arange(3), np.array([0.5], np.float32)]
    >>> buffer = pack(arrays, lambda size: torch.empty(size, dtype=torch.uint8))
    >>> buffer.shape, unpack(buffer, arrays)
    (torch.Size([48]), [tensor([0, 1, 2]), tensor([0.5000])])

    Args:
        make_buffer: from a number of bytes to a buffer of that size.
    """
    buffer = make_buffer(sum(_padded_bytes(array) for array in arrays))
    place = buffer.numpy()
    for array in arrays:
        place[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        place = place[_padded_bytes(array) :]
    return buffer


def unpack(buffer: Tensor, arrays: Sequence[NDArray]) -> list[Tensor]:
    """The ``arrays`` of :func:`pack`, as views of its buffer or of a copy of it."""
    tensors, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        tensors.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _padded_bytes(array)
    return tensors


def _padded_bytes(array: NDArray) -> int:
    return math.ceil(array.nbytes / ALIGNMENT) * ALIGNMENT


# ---------------------------------------------------------------- GPU


class CudaEvent(DeviceEvent):
    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        return earlier._event.elapsed_time(self._event) / 1000


class CudaDownload(Download):
    """Copies on a stream of its own, so that kernels queued later on the main stream don't wait for
    them."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            self._tensors = [_to_pinned(tensor) for tensor in tensors]
            self._done.record()
        for tensor in tensors:
            tensor.record_stream(stream)  # its memory is not handed out again before it is read

    def is_ready(self) -> bool:
        return self._done.query()

    def wait(self) -> list[Tensor]:
        self._done.synchronize()
        return self._tensors


def _to_pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _pinned_bytes(size: int) -> Tensor:
    """A new pinned buffer. Torch reuses pinned memory only when the copies from it are done, so a
    step can fill a new buffer without waiting."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class CudaDevice:
    """A GPU: its current stream is the queue."""

    def __init__(self, torch_device: torch.device) -> None:
        if torch_device.index is None:  # set_device wants a number
            torch_device = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(torch_device)
        self.torch_device = torch_device
        self.overlaps = True
        self.has_graphs = True
        self._downloads = torch.cuda.Stream(torch_device)
        self._captures = torch.cuda.Stream(torch_device)
        self._captured_last: weakref.ref[torch.cuda.CUDAGraph] | None = None

    def upload(self, *arrays: NDArray) -> list[Tensor]:
        if not arrays:
            return []
        staged = pack(arrays, _pinned_bytes)
        return unpack(staged.to(self.torch_device, non_blocking=True), arrays)

    def pin(self, *arrays: NDArray) -> list[Tensor]:
        return unpack(pack(arrays, _pinned_bytes), arrays)

    def download(self, tensors: Sequence[Tensor]) -> CudaDownload:
        return CudaDownload(tensors, self._downloads)

    def record_event(self) -> CudaEvent:
        return CudaEvent()

    def capture(self, work: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        # torch.cuda.graph() would also collect garbage and give memory back each time: a second for
        # each graph, and allocations in the middle of serving.
        graph, stream = torch.cuda.CUDAGraph(), self._captures
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate and choose kernels at their first calls
                work()
            torch.cuda.synchronize(self.torch_device)
            # Other threads (grammars are loaded in some) may make calls that a capture forbids to
            # this one.
            graph.capture_begin(self._graph_memory(), capture_error_mode="thread_local")
            try:
                made = work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        self._captured_last = weakref.ref(graph)
        return graph.replay, made

    def _graph_memory(self) -> Any:
        """The memory pool of the graph captured last, or a new one: a pool ends with its last
        graph, and torch refuses to capture into it then."""
        last = None if self._captured_last is None else self._captured_last()
        return torch.cuda.graph_pool_handle() if last is None else last.pool()
