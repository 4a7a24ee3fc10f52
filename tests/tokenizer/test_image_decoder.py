"""The process that decodes images: what it gives is what Pillow gives, and it ends alone."""

import base64
import contextlib
import errno
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from radixrt.base.errors import RequestError
from radixrt.tokenizer.images import decoder as decoder_module
from radixrt.tokenizer.images.decoder import (
    BYTES_OF_A_PIXEL,
    CPU_SECONDS,
    MEMORY_BYTES,
    NICENESS,
    CpuBudget,
    ImageDecoder,
    _Death,
    _decoded,
    _Order,
    _Reply,
)
from radixrt.tokenizer.images.decoding import DEFAULT_LIMITS, ImageLimits, decode_image
from tests.checkpoints.image_checkpoints import picture, png
from tests.tokenizer.test_images import FILES

thorough = pytest.mark.skipif(
    "RADIXRT_DETERMINISM" not in os.environ, reason="make determinism runs it"
)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder(longest_wait_s=600)
    yield decoder
    process = decoder.start()
    process.kill()
    process.wait()


def decoded(
    decoder: ImageDecoder,
    data: str,
    limits: ImageLimits = DEFAULT_LIMITS,
    budget: CpuBudget | None = None,
) -> Image.Image:
    return decoder.decode(data.encode(errors="surrogatepass"), "Image 1", limits, budget)


def turned(orientation: int) -> str:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return png(picture(4, 37, 21), "JPEG", exif=exif)


def test_it_decodes_as_pillow_does(decoder: ImageDecoder) -> None:
    large = png(Image.fromarray(np.random.default_rng(2).integers(0, 256, (900, 700, 3), np.uint8)))
    for data in (large, *FILES.values(), *map(turned, range(1, 9))):
        found, expected = decoded(decoder, data), decode_image(data, "Image 1")
        assert found.mode == expected.mode == "RGB" and found.size == expected.size
        assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_its_errors_are_those_of_the_request(decoder: ImageDecoder) -> None:
    data, limits = png(picture(1)), ImageLimits(pixels=40 * 30 - 1)
    for bad, given, status in (
        ("%%%%", limits, 400),
        ("ä\ud800", limits, 400),
        (data[:400], ImageLimits(), 400),
        (data, limits, 413),
        (data, ImageLimits(pixels=500), 413),
        (data, ImageLimits(num_bytes=10), 413),
    ):
        with pytest.raises(RequestError, match=r"^Image 1 ") as refused:
            decoded(decoder, bad, given)
        assert refused.value.status == status and refused.value.code == "invalid_image"
    assert decoded(decoder, data, ImageLimits(pixels=40 * 30)).size == (40, 30)


def many_scans() -> bytes:
    """A progressive JPEG whose last scan is there ten thousand times."""
    file = base64.b64decode(png(picture(2, 2048, 2048), "JPEG", progressive=True, quality=5))
    last = file.rindex(b"\xff\xda")
    return file[:last] + file[last:-2] * (12 << 20 >> (len(file) - last).bit_length()) + file[-2:]


def many_segments() -> bytes:
    """A JPEG with EXIF data in parts of a byte, each of which Pillow adds to those before."""
    file = base64.b64decode(png(picture(2), "JPEG"))
    return file[:2] + b"\xff\xe1\0\x09Exif\0\0a" * (1 << 19) + file[2:]


@pytest.mark.parametrize(
    "bomb",
    [
        many_segments,
        pytest.param(many_scans, marks=thorough),
    ],
)
def test_a_small_file_that_takes_long_is_refused(decoder: ImageDecoder, bomb: object) -> None:
    """It has what the images before it have left of the request's time, in whole seconds."""
    assert callable(bomb)
    data = base64.b64encode(bomb()).decode()
    assert len(data) < 20 << 20
    process = decoder.start()
    with pytest.raises(RequestError, match=r"Image 1 .* too much time") as refused:
        decoded(decoder, data, budget=CpuBudget(0.5))
    assert refused.value.status == 400
    assert process.returncode == -signal.SIGXCPU
    assert decoded(decoder, png(picture(1))).size == (40, 30)


def test_all_images_of_a_request_share_its_time(decoder: ImageDecoder) -> None:
    budget = CpuBudget(2.0)
    budget.check("Image 1")
    decoded(decoder, png(picture(5, 2048, 2048)), budget=budget)
    assert 0 < budget.left < 2
    most, _ = resource.prlimit(decoder.start().pid, resource.RLIMIT_CPU)
    assert most < CPU_SECONDS, "one image may not take more than is left"
    budget.left = 0.0
    with pytest.raises(RequestError, match=r"Image 9 is not decoded: .* 2 s of CPU") as refused:
        budget.check("Image 9")
    assert refused.value.status == 400


@contextlib.contextmanager
def dying(decoder: ImageDecoder, *signals: signal.Signals) -> Iterator[None]:
    """The process of the decoder gets signals while an image is decoded."""
    decoded(decoder, png(picture(1)))
    process = decoder.start()
    process.send_signal(signal.SIGSTOP)

    def send() -> None:
        for one in (*signals, signal.SIGCONT):
            process.send_signal(one)

    timer = threading.Timer(0.1, send)
    timer.start()
    yield
    timer.join()


@pytest.mark.skipif(sys.platform != "linux", reason="Others name signals otherwise")
def test_who_is_at_fault_for_its_death_is_told(
    decoder: ImageDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    image = png(picture(1))
    with dying(decoder, signal.SIGKILL):
        assert decoded(decoder, image).size == (40, 30), "somebody else ended it: it is replaced"
    with (
        dying(decoder, signal.SIGSEGV),
        pytest.raises(RequestError, match=r"Image 1 .* its decoder crashes") as crash,
    ):
        decoded(decoder, image)
    assert crash.value.status == 400
    decoded(decoder, image)
    stdin = decoder.start().stdin
    with (
        dying(decoder),
        pytest.raises(RequestError, match="an error of the server") as error,
    ):
        assert stdin is not None
        stdin.write(b"no order\n")  # an exception of the process
        decoded(decoder, image)
    assert error.value.status == 500
    assert [one.getMessage() for one in caplog.records] == [
        "The process that decodes images has ended (-11).",
        "The process that decodes images has ended (1).",
    ]


def test_one_that_is_ended_again_and_again_is_not_the_images_fault(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = 0

    def end(order: _Order) -> _Reply:
        nonlocal ended
        ended += 1
        raise _Death(-signal.SIGKILL)

    monkeypatch.setattr(decoder, "_ask", end)
    with pytest.raises(RequestError, match="send the request again") as refused:
        decoded(decoder, png(picture(1)))
    assert refused.value.status == 503 and ended == 2


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_a_full_disk_is_not_the_images_fault(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of files' sizes stands for it in the process."""
    image = png(picture(1))
    decoded(decoder, image)
    process = decoder.start()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(RequestError, match="send the request again") as refused:
        decoded(decoder, image)
    assert refused.value.status == 503 and refused.value.retry_after_s
    assert decoder.start() is process, "it has not died"
    process.kill()
    process.wait()

    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(RequestError) as refused:
        patched.setattr(decoder, "_write", full)
        decoded(decoder, image)
    assert refused.value.status == 503
    assert decoded(decoder, image).size == (40, 30)


def test_an_image_that_takes_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decoder_module, "decode_image", decode)
    with (tmp_path / "file").open("wb+") as file:
        reply = _decoded(file.fileno(), _Order(0, "Image 1", ImageLimits(), 1))
    assert reply.status == 400 and "too much time or memory" in reply.error


@pytest.mark.skipif(sys.platform != "linux", reason="memfd_create")
def test_no_image_comes_to_a_disk(decoder: ImageDecoder) -> None:
    assert os.readlink(f"/proc/self/fd/{decoder._file.fileno()}").startswith("/memfd:")


def test_it_yields_to_others_and_takes_little_memory(decoder: ImageDecoder) -> None:
    limits = ImageLimits(pixels=40 * 30)
    assert decoded(decoder, png(picture(1)), limits).size == (40, 30)
    number = decoder.start().pid
    own, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, number))
    assert its == min(own + NICENESS, 19)
    most, _ = resource.prlimit(number, resource.RLIMIT_AS)
    assert most == MEMORY_BYTES + BYTES_OF_A_PIXEL * limits.pixels


def test_one_that_dies_or_stops_is_replaced() -> None:
    decoder = ImageDecoder(longest_wait_s=0.05)
    process = decoder.start()
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(RequestError, match="too much time"):
        decoded(decoder, png(picture(1)))
    assert process.returncode == -signal.SIGKILL
    replaced = ImageDecoder()
    first = replaced.start()
    decoded(replaced, png(picture(1)))
    first.kill()
    first.wait()
    assert decoded(replaced, png(picture(1))).size == (40, 30)
    second = replaced.start()
    assert second is not first
    assert second.stdin is not None
    second.stdin.close()
    assert second.wait(10) == 0, "it ends with its parent"
