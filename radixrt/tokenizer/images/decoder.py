"""Decodes image files in a process of its own, which may take little time and memory, and dies alone.

Whoever sends an image chooses what its decoder does. Some files take minutes: Pillow joins the EXIF
segments of a JPEG in quadratic time, and libjpeg goes over all pixels once a scan. Others hold
Python's lock for a tenth of a second, and with it all answers. None of this is seen in a header. The
process yields to those that compute answers.
"""

import contextlib
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import msgspec

from radixrt.base.errors import RequestError
from radixrt.tokenizer.images.decoding import (
    DEFAULT_LIMITS,
    ImageLimits,
    decode_image,
    invalid_image,
)

if TYPE_CHECKING:
    from PIL import Image

CPU_SECONDS = 10
"""For one image; the largest that is taken needs about one."""
LONGEST_WAIT_S = 20.0
"""For one image on a busy machine: less than a text may keep the tokenizer process."""
NICENESS = 5
MEMORY_BYTES = 1 << 30
"""Address space of the process, but for pixels."""
BYTES_OF_A_PIXEL = 32
"""Memory in which a pixel is decoded and converted."""


class _Order(msgspec.Struct, frozen=True):
    """Decode the file that is in the shared file."""

    num_bytes: int
    where: str
    limits: ImageLimits
    cpu_seconds: int


class _Reply(msgspec.Struct, frozen=True):
    """Pixels are in the shared file, 4 bytes each, or an error."""

    width: int = 0
    height: int = 0
    error: str = ""
    status: int = 400


class ImageDecoder:
    """One process, for one thread at a time; a new one is started when it has died."""

    def __init__(
        self, *, cpu_seconds: int = CPU_SECONDS, longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._cpu_seconds, self._longest_wait_s = cpu_seconds, longest_wait_s
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as this)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process, unless it runs."""
        if self._process is None or self._process.poll() is not None:
            number = self._file.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[number],
                bufsize=0,
            )
        return self._process

    def decode(
        self, data: bytes, where: str, limits: ImageLimits = DEFAULT_LIMITS
    ) -> "Image.Image":
        """See :func:`decode_image`.

        Raises:
            RequestError: in addition, the image takes too much time or memory.
        """
        self._file.seek(0)
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            reply = self._ask(_Order(len(data), where, limits, self._cpu_seconds))
            if reply is None:
                raise invalid_image(where, "can't be decoded: it takes too much time or memory")
            if reply.error:
                raise RequestError(
                    reply.error, status=reply.status, param="messages", code="invalid_image"
                )
            return self._image(reply.width, reply.height)
        finally:
            self._file.truncate(0)

    def _image(self, width: int, height: int) -> "Image.Image":
        """A copy of the pixels in the shared file."""
        from PIL import Image

        pixels = mmap.mmap(self._file.fileno(), 4 * width * height, access=mmap.ACCESS_READ)
        mapped = Image.frombuffer("RGBX", (width, height), cast(bytes, pixels), "raw", "RGBX", 0, 1)
        return mapped.convert("RGB")

    def _ask(self, order: _Order) -> _Reply | None:
        """The reply; None: the process has died, or was ended for its time."""
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        line, replied = b"", select.poll()
        replied.register(process.stdout, select.POLLIN)
        with contextlib.suppress(OSError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            if replied.poll(1000 * self._longest_wait_s):
                line = process.stdout.readline()
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=_Reply)
        process.kill()
        process.wait()
        return None


_free: deque[ImageDecoder] = deque()
"""Decoders that no thread uses."""


@contextlib.contextmanager
def free_decoder() -> Iterator[ImageDecoder]:
    """A decoder for the calling thread alone: as many are made as threads decode at a time."""
    try:
        decoder = _free.pop()
    except IndexError:
        decoder = ImageDecoder()
    try:
        yield decoder
    finally:
        _free.append(decoder)


def _serve(number: int) -> None:
    """Decode what is in an open file, until the parent has ended."""
    from PIL import Image

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    os.nice(NICENESS)
    _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=_Order)
        Image.MAX_IMAGE_PIXELS = (order.limits.pixels + 1) // 2  # twice as many are an error
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + order.cpu_seconds)
        _limit(resource.RLIMIT_AS, MEMORY_BYTES + BYTES_OF_A_PIXEL * order.limits.pixels)
        sys.stdout.buffer.write(msgspec.json.encode(_decoded(number, order)) + b"\n")
        sys.stdout.buffer.flush()


def _decoded(number: int, order: _Order) -> _Reply:
    try:
        image = decode_image(os.pread(number, order.num_bytes, 0), order.where, order.limits)
    except RequestError as error:
        return _Reply(error=error.message, status=error.status)
    with open(number, "wb", closefd=False) as file:
        file.seek(0)
        file.write(image.tobytes("raw", "RGBX"))
    return _Reply(*image.size)


def _limit(kind: int, most: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # the system has a lower one
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
