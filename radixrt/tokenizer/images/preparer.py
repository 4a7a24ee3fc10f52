"""Decodes and prepares images in a process of its own, which may take little time and memory, and
dies alone.

Whoever sends an image chooses what its decoder does. Some files take minutes: Pillow joins the EXIF
segments of a JPEG in quadratic time, and libjpeg goes over all pixels once a scan. Others hold
Python's lock for a tenth of a second, and with it all answers, as do transformers' processors. None
of this is seen in a header. The process yields to those that compute answers.
"""

import contextlib
import errno
import logging
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from radixrt.base.errors import RequestError
from radixrt.messages.images import VisionInfo
from radixrt.tokenizer.fair_queue import goes_on, is_alive
from radixrt.tokenizer.images import tensor_file
from radixrt.tokenizer.images.decoding import DEFAULT_LIMITS, ImageLimits, invalid_image
from radixrt.tokenizer.images.preparing import TOO_MUCH, Order, Reply
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.images.tensor_file import TensorFile

log = logging.getLogger(__name__)

CPU_SECONDS = 10
"""One image may take so long; the largest that is accepted needs four or five seconds."""
REQUEST_CPU_SECONDS = 20.0
"""Decoding and preparing all images of a request may take so long; the requests behind it wait."""
LONGEST_WAIT_S = 60.0
"""A thread waits so long for one image: on a busy machine the process gets a quarter of a core."""
LONGEST_START_S = 120.0
"""Until the process has imported what it needs."""
SIGN_OF_LIFE_S = 1.0


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
            return invalid_image(where, TOO_MUCH)
        log.error("The process that prepares images has ended (%s).", self.code)
        if self.is_of_another:
            return _not_now(where)
        if self.code < 0:
            return invalid_image(where, "can't be decoded: its decoder crashes")
        return RequestError(f"{where} can't be decoded: an error of the server.", status=500)


def _not_now(where: str) -> RequestError:
    return RequestError(
        f"{where} can't be decoded for now; send the request again.", status=503, retry_after_s=5
    )


class ImagePreparer:
    """One process, for one thread at a time; a new one is started when it has died."""

    def __init__(self, *, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self.longest_wait_s = longest_wait_s
        self._shared = _open_file()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_begun = False

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process, unless it runs."""
        if self._process is None or self._process.poll() is not None:
            number = self._shared.fileno()
            self._has_begun = False
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "radixrt.tokenizer.images.preparing", str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[number],
                bufsize=0,
            )
        return self._process

    def load(self, folder: Path, vision: VisionInfo) -> None:
        """Load the processor of a checkpoint ahead of its first image. If it can't be loaded, that
        image's error says why.

        Raises:
            RequestError: the process has died.
        """
        with _errors("The image processor"):
            self._reply(Order(folder=str(folder), vision=vision, only_loads=True))

    def prepare(
        self,
        data: bytes,
        where: str,
        folder: Path,
        vision: VisionInfo,
        *,
        limits: ImageLimits = DEFAULT_LIMITS,
        budget: CpuBudget | None = None,
        files: Path | None = None,
    ) -> ProcessedImage:
        """Decode a file, see :func:`decode_image`, and let the processor of a checkpoint make the
        tower's tensor of it.

        Args:
            data: the file in base64.
            where: names the image in errors.
            folder: of the checkpoint.
            budget: what it takes is taken from this.
            files: folder for the file of a large tensor.

        Raises:
            RequestError: in addition, the image takes too much time or memory, the server lacks
                memory, or the processor can't be loaded, or takes no such image.
            NobodyWaits: the request is not wanted any more.
        """
        budget = budget or CpuBudget()
        file = None if files is None else TensorFile(files)
        order = Order(
            folder=str(folder),
            vision=vision,
            where=where,
            num_bytes=len(data),
            limits=limits,
            cpu_seconds=min(CPU_SECONDS, math.ceil(budget.left)),
            tensor_file="" if file is None else str(file.path),
            max_sent_bytes=tensor_file.MAX_SENT_BYTES,
        )
        try:
            with _errors(where):
                self._write(data)
                reply = self._reply(order)
                budget.left -= reply.cpu_seconds
                if reply.status == 503:
                    raise OSError(reply.error)
                if reply.error:
                    raise _error(reply)
                tensor: bytes | TensorFile
                if file is not None and reply.in_file:
                    tensor = file
                else:
                    tensor = self._read(4 * math.prod(reply.shape))
        finally:
            self._shared.truncate(0)
        return ProcessedImage.of_tensor(vision, reply.key, reply.shape, reply.grid, tensor)

    def _write(self, data: bytes) -> None:
        self._shared.seek(0)
        rest = memoryview(data)
        while rest:
            rest = rest[self._shared.write(rest) :]

    def _read(self, num_bytes: int) -> bytes:
        self._shared.seek(0)
        return self._shared.read(num_bytes)

    def _reply(self, order: Order) -> Reply:
        """The reply of the process, or of the next one if somebody ends it.

        Raises:
            _Death: it ends without one.
            OSError: it does not begin.
            NobodyWaits: the request is not wanted any more.
        """
        try:
            return self._ask(order)
        except _Death as death:
            if not death.is_of_another:
                raise
        return self._ask(order)

    def _ask(self, order: Order) -> Reply:
        process = self.start()
        self._wait_until_begun(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(order) + b"\n")
        end = time.monotonic() + self.longest_wait_s
        while (left := end - time.monotonic()) > 0:
            if (reply := _next_reply(process, min(left, SIGN_OF_LIFE_S))) is not None:
                return reply
            is_alive()
        process.kill()
        process.wait()
        raise _Death(None)

    def _wait_until_begun(self, process: "subprocess.Popen[bytes]") -> None:
        """Wait until a new process has imported what it needs."""
        end = time.monotonic() + LONGEST_START_S
        while not self._has_begun:
            goes_on()
            self._has_begun = _next_reply(process, SIGN_OF_LIFE_S) is not None
            if time.monotonic() > end:
                process.kill()
                process.wait()
                raise OSError(errno.ETIMEDOUT, "its process does not begin")


def _next_reply(process: "subprocess.Popen[bytes]", seconds: float) -> Reply | None:
    """The next reply of a process; None: it does not come in time.

    Raises:
        _Death: the process has died.
    """
    assert process.stdout is not None
    replies = select.poll()
    replies.register(process.stdout, select.POLLIN)
    if not replies.poll(1000 * seconds):
        return None
    line = process.stdout.readline()
    if line.endswith(b"\n"):
        return msgspec.json.decode(line, type=Reply)
    raise _Death(process.wait())


def _error(reply: Reply) -> RequestError:
    if reply.status >= 500:
        return RequestError(reply.error, status=reply.status)
    return RequestError(reply.error, status=reply.status, param="messages", code="invalid_image")


@contextlib.contextmanager
def _errors(where: str) -> Iterator[None]:
    """Turn what happens to the process into errors of requests."""
    try:
        yield
    except OSError as error:
        log.error("An image can't be prepared: %s.", error)
        raise _not_now(where) from error
    except _Death as death:
        raise death.error(where) from death


def _open_file() -> IO[bytes]:
    """A file without a name: in memory where the system has such files, so that no image comes to
    a disk."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("image"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


_free: deque[ImagePreparer] = deque()
"""Preparers that no thread uses."""


@contextlib.contextmanager
def free_preparer() -> Iterator[ImagePreparer]:
    """A preparer for the calling thread alone: as many are made as threads prepare at a time."""
    try:
        preparer = _free.pop()
    except IndexError:
        preparer = ImagePreparer()
    try:
        yield preparer
    finally:
        _free.append(preparer)
