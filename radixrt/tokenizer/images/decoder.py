"""Decodes image files in a process of its own, which may take little time and memory, and dies alone.

Whoever sends an image chooses what its decoder does. Some files take minutes: Pillow joins the EXIF
segments of a JPEG in quadratic time, and libjpeg goes over all pixels once a scan. Others hold
Python's lock for a tenth of a second, and with it all answers. None of this is seen in a header. The
process yields to those that compute answers.
"""

import contextlib
import logging
import math
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, cast

import msgspec
from msgspec.structs import replace

from radixrt.base.errors import RequestError
from radixrt.tokenizer.images.decoding import (
    DEFAULT_LIMITS,
    ImageLimits,
    decode_image,
    invalid_image,
)

if TYPE_CHECKING:
    from PIL import Image

log = logging.getLogger(__name__)

CPU_SECONDS = 10
"""One image may take so long; the largest that is accepted needs about one second."""
REQUEST_CPU_SECONDS = 20.0
"""Decoding and preparing all images of a request may take so long; the requests behind it wait."""
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
    cpu_seconds: float = 0.0


class CpuBudget:
    """CPU time that the images of one request may take from now on."""

    def __init__(self, seconds: float = REQUEST_CPU_SECONDS) -> None:
        self.seconds = self.left = seconds

    def check(self, where: str) -> None:
        """
        Args:
            where: names the image that is next.

        Raises:
            RequestError: it is used up.
        """
        if self.left <= 0:
            raise invalid_image(
                where,
                f"is not decoded: the images before it took all of the {self.seconds:g} s of CPU time that a request has. Send "
                "fewer or smaller ones",
            )


class _Death(Exception):
    """The process ended before it replied. ``code`` is that of ``Popen.returncode``; None: it was
    ended for its time."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code

    @property
    def is_of_another(self) -> bool:
        """Whether somebody else ended it, so that the image may not be at fault."""
        return self.code in (0, -signal.SIGKILL, -signal.SIGTERM)

    def error(self, where: str) -> RequestError:
        """What the client of the image reads."""
        if self.code is None or self.code == -signal.SIGXCPU:
            return invalid_image(where, _TOO_MUCH)
        log.error("The process that decodes images has ended (%s).", self.code)
        if self.is_of_another:
            return _not_now(where)
        if self.code < 0:
            return invalid_image(where, "can't be decoded: its decoder crashes")
        return RequestError(f"{where} can't be decoded: an error of the server.", status=500)


_TOO_MUCH = "can't be decoded: it takes too much time or memory"


def _not_now(where: str) -> RequestError:
    return RequestError(
        f"{where} can't be decoded for now; send the request again.", status=503, retry_after_s=5
    )


class ImageDecoder:
    """One process, for one thread at a time; a new one is started when it has died."""

    def __init__(self, *, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self._longest_wait_s = longest_wait_s
        self._file = _open_file()
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
        self,
        data: bytes,
        where: str,
        limits: ImageLimits = DEFAULT_LIMITS,
        budget: CpuBudget | None = None,
    ) -> "Image.Image":
        """See :func:`decode_image`.

        Args:
            budget: what it takes is taken from this.

        Raises:
            RequestError: in addition, the image takes too much time or memory, or the server lacks
                memory.
        """
        budget = budget or CpuBudget()
        cpu_seconds = min(CPU_SECONDS, math.ceil(budget.left))
        try:
            self._write(data)
            reply = self._reply(_Order(len(data), where, limits, cpu_seconds))
            budget.left -= reply.cpu_seconds
            if reply.status == 503:
                raise OSError(reply.error)
            if reply.error:
                raise RequestError(
                    reply.error, status=reply.status, param="messages", code="invalid_image"
                )
            return self._image(reply.width, reply.height)
        except OSError as error:
            log.error("An image can't be decoded: %s.", error)
            raise _not_now(where) from error
        except _Death as death:
            raise death.error(where) from death
        finally:
            self._file.truncate(0)

    def _write(self, data: bytes) -> None:
        self._file.seek(0)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _reply(self, order: _Order) -> _Reply:
        """The reply of the process, or of the next one if somebody ends it.

        Raises:
            _Death: it ends without one.
        """
        try:
            return self._ask(order)
        except _Death as death:
            if not death.is_of_another:
                raise
        return self._ask(order)

    def _image(self, width: int, height: int) -> "Image.Image":
        """A copy of the pixels in the shared file."""
        from PIL import Image

        pixels = mmap.mmap(self._file.fileno(), 4 * width * height, access=mmap.ACCESS_READ)
        mapped = Image.frombuffer("RGBX", (width, height), cast(bytes, pixels), "raw", "RGBX", 0, 1)
        return mapped.convert("RGB")

    def _ask(self, order: _Order) -> _Reply:
        """
        Raises:
            _Death: the process has died, or was ended for its time.
        """
        process = self.start()
        assert process.stdin is not None and process.stdout is not None
        replies = select.poll()
        replies.register(process.stdout, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
        if not replies.poll(1000 * self._longest_wait_s):
            process.kill()
            process.wait()
            raise _Death(None)
        line = process.stdout.readline()
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=_Reply)
        raise _Death(process.wait())


def _open_file() -> IO[bytes]:
    """A file without a name: in memory where the system has such files, so that no image comes to
    a disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("image"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


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
        begin = time.process_time()
        _limit(resource.RLIMIT_CPU, int(begin) + 1 + order.cpu_seconds)
        _limit(resource.RLIMIT_AS, MEMORY_BYTES + BYTES_OF_A_PIXEL * order.limits.pixels)
        reply = _decoded(number, order)
        reply = replace(reply, cpu_seconds=time.process_time() - begin)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


def _decoded(number: int, order: _Order) -> _Reply:
    try:
        image = decode_image(os.pread(number, order.num_bytes, 0), order.where, order.limits)
        with open(number, "wb", closefd=False) as file:
            file.seek(0)
            file.write(image.tobytes("raw", "RGBX"))
    except RequestError as error:
        return _Reply(error=error.message, status=error.status)
    except MemoryError:
        return _Reply(error=invalid_image(order.where, _TOO_MUCH).message)
    except OSError as error:
        return _Reply(error=error.strerror or str(error), status=503)
    return _Reply(*image.size)


def _limit(kind: int, most: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # the system has a lower one
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
