"""Decodes and prepares images in a process of its own; :mod:`radixrt.tokenizer.images.preparer` has
its parent."""

import contextlib
import os
import resource
import signal
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from radixrt.base.errors import RequestError
from radixrt.base.image_parts import BYTES_OF_A_PIXEL
from radixrt.messages.images import ImageKey, VisionInfo
from radixrt.tokenizer.images.decoding import ImageLimits, decode_image, invalid_image
from radixrt.tokenizer.images.families import Grid
from radixrt.tokenizer.images.processor import ImageProcessor

NICENESS = 5
MEMORY_BYTES = 1 << 30
"""Address space of the process, but for pixels."""
TOO_MUCH = "can't be decoded: it takes too much time or memory"


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Prepare the image whose file, in base64, is in the shared file."""

    folder: str
    """The folder of the checkpoint."""
    vision: VisionInfo
    only_loads: bool = False
    """There is no image: the processor is loaded for the next one."""
    where: str = ""
    """Names the image in errors."""
    num_bytes: int = 0
    limits: ImageLimits = ImageLimits()
    cpu_seconds: int = 0
    tensor_file: str = ""
    """Path of a new file for a large tensor; "": it stays in memory."""
    max_sent_bytes: int = 0
    """Tensors of more bytes are large."""


class Reply(msgspec.Struct, frozen=True):
    """An image that is prepared, or an error."""

    key: ImageKey = b""
    shape: tuple[int, ...] = ()
    """The shape of the tensor; see ``LoadImage.shape``."""
    grid: Grid = (0, 0)
    in_file: bool = False
    """The tensor is in the order's file, not in the shared one."""
    error: str = ""
    status: int = 400
    cpu_seconds: float = 0.0


def serve(shared: int, replies: int) -> None:
    """Prepare images until the parent has ended. The first reply says that it can begin.

    Args:
        shared: number of an open file.
        replies: number of the pipe to the parent.
    """
    from PIL import Image

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    os.nice(NICENESS)
    _limit(resource.RLIMIT_CORE, 0)
    _import_processors()
    _write(replies, Reply())
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        try:
            processor = ImageProcessor.of(Path(order.folder), order.vision)
        except Exception as error:  # transformers raises many kinds
            _write(replies, _cannot_load(error))
            continue
        if order.only_loads:
            _write(replies, Reply())
            continue
        Image.MAX_IMAGE_PIXELS = (order.limits.pixels + 1) // 2  # twice as many are an error
        begin = time.process_time()
        _limit(resource.RLIMIT_CPU, int(begin) + 1 + order.cpu_seconds)
        _limit(resource.RLIMIT_AS, MEMORY_BYTES + BYTES_OF_A_PIXEL * order.limits.pixels)
        reply = prepared(shared, processor, order)
        _write(replies, replace(reply, cpu_seconds=time.process_time() - begin))


def _import_processors() -> None:
    """Import what every processor needs, without torch, which none of those of Pillow uses: with it
    this takes three times the time and five times the memory."""
    sys.modules["torch"] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # it says that there is no torch
    from transformers import AutoImageProcessor  # noqa: F401


def prepared(shared: int, processor: ImageProcessor, order: Order) -> Reply:
    """The reply to an order; the tensor is in its file, or in the shared one."""
    try:
        file = os.pread(shared, order.num_bytes, 0)
        image = decode_image(file, order.where, order.limits)
        del file
        try:
            values, grid = processor.process(image)
        except ValueError as error:
            reason = f"can't be prepared for this model: {str(error)[:200]}"
            raise invalid_image(order.where, reason) from error
        del image
        in_file = values.nbytes > order.max_sent_bytes and _put_into_file(order.tensor_file, values)
        if not in_file:
            _put(shared, values)
    except RequestError as error:
        return Reply(error=error.message, status=error.status)
    except MemoryError:
        return Reply(error=invalid_image(order.where, TOO_MUCH).message)
    except OSError as error:
        return Reply(error=error.strerror or str(error), status=503)
    return Reply(processor.key(values), values.shape, grid, in_file)


def _cannot_load(error: Exception) -> Reply:
    reason = " ".join(str(error).split())
    return Reply(
        error=f"The server can't prepare images: the checkpoint's image processor can't be loaded ({reason[:300]}).",
        status=500,
    )


def _put_into_file(path: str, values: NDArray[np.float32]) -> bool:
    """Whether a tensor is in a new file: there is one for it, and room for it."""
    if not path:
        return False
    try:
        values.tofile(path)
    except OSError as error:
        print(f"An image is sent and not put into the file {path}: {error}.", file=sys.stderr)
        return False
    return True


def _put(number: int, values: NDArray[np.float32]) -> None:
    with open(number, "wb", closefd=False) as file:
        file.seek(0)
        file.write(values.data)


def _write(replies: int, reply: Reply) -> None:
    os.write(replies, msgspec.json.encode(reply) + b"\n")


def _limit(kind: int, most: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # the system has a lower one
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    number = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing that libraries print is a reply
    serve(int(sys.argv[1]), number)
