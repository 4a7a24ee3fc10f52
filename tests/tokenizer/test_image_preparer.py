"""The process that prepares images: what it gives is what Pillow and transformers give, and it ends
alone."""

import base64
import contextlib
import errno
import functools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_utils import load_image

from radixrt.base.errors import RequestError
from radixrt.base.image_parts import BYTES_OF_A_PIXEL
from radixrt.tokenizer.fair_queue import NobodyWaits
from radixrt.tokenizer.images import preparer as preparer_module
from radixrt.tokenizer.images import preparing
from radixrt.tokenizer.images.decoding import ImageLimits
from radixrt.tokenizer.images.preparer import (
    CPU_SECONDS,
    CpuBudget,
    ImagePreparer,
    _Death,
)
from radixrt.tokenizer.images.preparing import (
    MEMORY_BYTES,
    NICENESS,
    Order,
    Reply,
    prepared,
)
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.images.processor import ImageProcessor
from tests.checkpoints.image_checkpoints import PIXELS, make_pixel_processor, picture, png
from tests.tokenizer.test_images import FILES

thorough = pytest.mark.skipif(
    "RADIXRT_DETERMINISM" not in os.environ, reason="make determinism runs it"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pixel_processor(tmp_path_factory.mktemp("pixels"))


@pytest.fixture(scope="module")
def preparer() -> Iterator[ImagePreparer]:
    preparer = ImagePreparer(longest_wait_s=600)
    yield preparer
    process = preparer.start()
    process.kill()
    process.wait()


Prepare = Callable[..., ProcessedImage]


@pytest.fixture
def prepare(preparer: ImagePreparer, folder: Path) -> Prepare:
    return functools.partial(prepare_by, preparer, folder)


def prepare_by(preparer: ImagePreparer, folder: Path, data: str, **settings: Any) -> ProcessedImage:
    content = data.encode(errors="surrogatepass")
    return preparer.prepare(content, "Image 1", folder, PIXELS, **settings)


def size_of(image: ProcessedImage) -> tuple[int, int]:
    _, _, height, width = image.shape
    return width, height


def turned(orientation: int) -> str:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return png(picture(4, 37, 21), "JPEG", exif=exif)


def test_it_prepares_as_transformers_does(prepare: Prepare, folder: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    large = png(Image.fromarray(np.random.default_rng(2).integers(0, 256, (900, 700, 3), np.uint8)))
    for data in (large, *FILES.values(), *map(turned, range(1, 9))):
        found = prepare(data)
        expected = processor(load_image(data), return_tensors="np")["pixel_values"]
        assert found.shape == expected.shape
        assert found.pixels == expected.astype("<f4").tobytes()


def test_its_errors_are_those_of_the_request(preparer: ImagePreparer, prepare: Prepare) -> None:
    data, limits = png(picture(1)), ImageLimits(pixels=40 * 30 - 1)
    for bad, given, status in (
        ("%%%%", limits, 400),
        ("ä\ud800", limits, 400),
        ("", limits, 400),
        (data[:400], ImageLimits(), 400),
        (data, limits, 413),
        (data, ImageLimits(pixels=500), 413),
        (data, ImageLimits(num_bytes=10), 413),
    ):
        with pytest.raises(RequestError, match=r"^Image 1 ") as refused:
            prepare(bad, limits=given)
        assert refused.value.status == status and refused.value.code == "invalid_image"
    assert size_of(prepare(data, limits=ImageLimits(pixels=40 * 30))) == (40, 30)


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
def test_a_small_file_that_takes_long_is_refused(
    preparer: ImagePreparer, prepare: Prepare, bomb: object
) -> None:
    """It has what the images before it have left of the request's time, in whole seconds."""
    assert callable(bomb)
    data = base64.b64encode(bomb()).decode()
    assert len(data) < 20 << 20
    process = preparer.start()
    with pytest.raises(RequestError, match=r"Image 1 .* too much time") as refused:
        prepare(data, budget=CpuBudget(0.5))
    assert refused.value.status == 400
    assert process.returncode == -signal.SIGXCPU
    assert size_of(prepare(png(picture(1)))) == (40, 30)


def test_all_images_of_a_request_share_its_time(preparer: ImagePreparer, prepare: Prepare) -> None:
    budget = CpuBudget(2.0)
    budget.check("Image 1")
    prepare(png(picture(5, 2048, 2048)), budget=budget)
    assert 0 < budget.left < 2
    most, _ = resource.prlimit(preparer.start().pid, resource.RLIMIT_CPU)
    assert most < CPU_SECONDS, "one image may not take more than is left"
    budget.left = 0.0
    with pytest.raises(RequestError, match=r"Image 9 is not decoded: .* 2 s of CPU") as refused:
        budget.check("Image 9")
    assert refused.value.status == 400


@contextlib.contextmanager
def dying(preparer: ImagePreparer, *signals: signal.Signals) -> Iterator[None]:
    """The process of the preparer gets signals while an image is prepared."""
    process = preparer.start()
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
    preparer: ImagePreparer, prepare: Prepare, caplog: pytest.LogCaptureFixture
) -> None:
    image = png(picture(1))
    prepare(image)
    with dying(preparer, signal.SIGKILL):
        assert size_of(prepare(image)) == (40, 30), "somebody else ended it: it is replaced"
    with (
        dying(preparer, signal.SIGSEGV),
        pytest.raises(RequestError, match=r"Image 1 .* its decoder crashes") as crash,
    ):
        prepare(image)
    assert crash.value.status == 400
    error = _Death(1).error("Image 1")  # an exception of the process
    assert error.status == 500 and "an error of the server" in error.message
    assert [one.getMessage() for one in caplog.records] == [
        "The process that prepares images has ended (-11).",
        "The process that prepares images has ended (1).",
    ]


def test_one_that_is_ended_again_and_again_is_not_the_images_fault(
    preparer: ImagePreparer, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = 0

    def end(order: Order) -> Reply:
        nonlocal ended
        ended += 1
        raise _Death(-signal.SIGKILL)

    monkeypatch.setattr(preparer, "_ask", end)
    with pytest.raises(RequestError, match="send the request again") as refused:
        prepare(png(picture(1)))
    assert refused.value.status == 503 and ended == 2


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_a_full_disk_is_not_the_images_fault(
    preparer: ImagePreparer, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of files' sizes stands for it in the process."""
    image = png(picture(1))
    prepare(image)
    process = preparer.start()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    with pytest.raises(RequestError, match="send the request again") as refused:
        prepare(image)
    assert refused.value.status == 503 and refused.value.retry_after_s
    assert preparer.start() is process, "it has not died"

    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(RequestError) as refused:
        patched.setattr(preparer, "_write", full)
        prepare(image)
    assert refused.value.status == 503
    process.kill()
    process.wait()


def test_a_request_that_is_gone_does_not_wait_for_the_process_to_begin(
    preparer: ImagePreparer, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test before has ended it."""

    def gone() -> None:
        raise NobodyWaits

    with monkeypatch.context() as patched, pytest.raises(NobodyWaits):
        patched.setattr(preparer_module, "goes_on", gone)
        prepare(png(picture(1)))
    process = preparer.start()
    assert size_of(prepare(png(picture(2, 50, 20)))) == (50, 20)
    assert preparer.start() is process


def test_an_image_that_takes_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(preparing, "decode_image", decode)
    order, unused = Order(folder="", vision=PIXELS, where="Image 1"), cast(ImageProcessor, None)
    with (tmp_path / "file").open("wb+") as file:
        reply = prepared(file.fileno(), unused, order)
    assert reply.status == 400 and "too much time or memory" in reply.error


def test_a_processor_that_cannot_be_loaded_is_not_the_images_fault(
    preparer: ImagePreparer, tmp_path: Path
) -> None:
    preparer.load(tmp_path, PIXELS)
    with pytest.raises(RequestError, match="image processor can't be loaded") as error:
        prepare_by(preparer, tmp_path, png(picture(1)))
    assert error.value.status == 500


def test_what_it_imports_is_not_in_this_process_and_has_no_torch(preparer: ImagePreparer) -> None:
    """Importing takes a second with Python's lock, and torch three and 250 MB."""
    code = (
        "import sys, radixrt.tokenizer.process; print(*sorted({'torch', 'PIL'} & {*sys.modules}))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert not output.stdout.split()
    if sys.platform == "linux":
        maps = Path(f"/proc/{preparer.start().pid}/maps").read_text()
        assert "PIL" in maps and "torch" not in maps


@pytest.mark.skipif(sys.platform != "linux", reason="memfd_create")
def test_no_file_comes_to_a_disk(preparer: ImagePreparer) -> None:
    assert os.readlink(f"/proc/self/fd/{preparer._shared.fileno()}").startswith("/memfd:")


def test_it_yields_to_others_and_takes_little_memory(
    preparer: ImagePreparer, prepare: Prepare
) -> None:
    limits = ImageLimits(pixels=40 * 30)
    assert size_of(prepare(png(picture(1)), limits=limits)) == (40, 30)
    number = preparer.start().pid
    own, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, number))
    assert its == min(own + NICENESS, 19)
    most, _ = resource.prlimit(number, resource.RLIMIT_AS)
    assert most == MEMORY_BYTES + BYTES_OF_A_PIXEL * limits.pixels


def test_one_that_stops_is_ended_and_one_without_a_parent_ends(
    preparer: ImagePreparer, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    signs_of_life: list[None] = []
    monkeypatch.setattr(preparer_module, "SIGN_OF_LIFE_S", 0.05)
    monkeypatch.setattr(preparer_module, "is_alive", lambda: signs_of_life.append(None))
    prepare(png(picture(1)))
    process = preparer.start()
    process.send_signal(signal.SIGSTOP)
    signs_of_life.clear()
    with monkeypatch.context() as patched, pytest.raises(RequestError, match="too much time"):
        patched.setattr(preparer, "longest_wait_s", 0.2)
        prepare(png(picture(1)))
    assert process.returncode == -signal.SIGKILL
    assert len(signs_of_life) > 1, "its thread is not taken for hung"
    assert size_of(prepare(png(picture(1)))) == (40, 30)
    process = preparer.start()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
