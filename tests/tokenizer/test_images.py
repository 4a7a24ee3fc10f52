"""Decoding images: what a processor gets is what transformers' ``load_image`` makes of the file."""

import base64
import contextlib
import io
import struct
import tracemalloc
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers.image_utils import load_image

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.messages.images import (
    SHORTEST_PAGE,
    DropImage,
    HurryImage,
    ImageRun,
    LoadImage,
)
from radixrt.tokenizer.explain.records import PromptRecord
from radixrt.tokenizer.images import kept_images, places
from radixrt.tokenizer.images.decoding import ImageLimits, decode_image
from radixrt.tokenizer.images.kept_images import KeptImages
from radixrt.tokenizer.images.places import NO_PLACEHOLDER, ImagePlacer
from radixrt.tokenizer.images.preparer import CpuBudget, free_preparer
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.images.sent_images import SentImages
from tests.checkpoints.image_checkpoints import PIXELS, make_pixel_processor, picture, png
from tests.servers.fake_scheduler import engine_info

SEEN = picture(9, 37, 21)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # by a quarter
GRAY16 = Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 109)


def with_alpha() -> Image.Image:
    image = SEEN.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


FILES = {
    "JPEG": png(SEEN, "JPEG"),
    "JPEG in CMYK": png(SEEN.convert("CMYK"), "JPEG"),
    "turned JPEG": png(SEEN, "JPEG", exif=TURNED),
    "PNG with alpha": png(with_alpha()),
    "gray with alpha": png(with_alpha().convert("LA")),
    "palette": png(SEEN.quantize(16)),
    "transparent palette": png(SEEN.quantize(16), transparency=3),
    "black and white": png(SEEN.convert("1")),
    "16 bits": png(GRAY16),
    "WebP": png(with_alpha(), "WEBP", lossless=True),
    "GIF": png(SEEN, "GIF"),
    "BMP": png(SEEN, "BMP"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_decoded_image_is_that_of_transformers(name: str) -> None:
    ours, theirs = decode_image(FILES[name], "Image 1"), load_image(FILES[name])
    assert ours.mode == theirs.mode == "RGB" and ours.size == theirs.size
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert (ours.size[0] < ours.size[1]) is (name == "turned JPEG")


@pytest.mark.parametrize(
    "name, file",
    [
        ("AVIF", b"\0\0\0\x1cftypavif\0\0\0\0"),
        ("HEIC", b"\0\0\0\x18ftypheic\0\0\0\0"),
        ("TIFF", b"MM\0*\0\0\0\x08"),
        ("SVG", b'<?xml version="1.0"?><svg/>'),
        ("PDF", b"%PDF-1.7"),
        ("", b"\0" * 64),
    ],
)
def test_a_format_that_is_not_decoded_is_named(name: str, file: bytes) -> None:
    words = f"Image 2 has the format {name}; this server decodes PNG" if name else "is in no format"
    with pytest.raises(RequestError, match=words):
        decode_image(base64.b64encode(file).decode(), "Image 2")


def test_nothing_is_decoded_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is known from the header."""
    data = png(SEEN)
    decode_image(data, "Image 1", ImageLimits(pixels=37 * 21, num_bytes=len(data) * 3 // 4))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    for limits, words in (
        (ImageLimits(pixels=37 * 21 - 1), r"Image 1 may have at most 776 pixels .* has 37x21"),
        (ImageLimits(num_bytes=len(data) * 3 // 4 - 9), r"Image 1 has \d+ bytes; at most"),
    ):
        with pytest.raises(RequestError, match=words) as refused:
            decode_image(data, "Image 1", limits)
        assert refused.value.status == 413


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_a_bomb_beside_the_pixels_is_not_unpacked(kind: bytes) -> None:
    """A chunk of a PNG that grows a thousandfold, where the size in the header says nothing."""
    plain = base64.b64decode(png(SEEN))
    packed = zlib.compress(bytes(1 << 24), 9)
    head = b"bomb\0" + (b"\1\0\0\0" if kind == b"iTXt" else b"\0")
    body = kind + head + packed
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    file = plain[:33] + chunk + plain[33:]  # behind the header
    tracemalloc.start()
    try:
        decoded = decode_image(base64.b64encode(file).decode(), "Image 1")
        assert np.array_equal(np.asarray(decoded), np.asarray(SEEN))
    except RequestError as error:
        assert error.status == 400
    finally:
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 1 << 23, "half of what it grows to"


def test_a_cut_file_is_refused_wherever_it_ends() -> None:
    for form in ("PNG", "JPEG", "WEBP"):
        file = base64.b64decode(png(picture(3, 200, 150), form))
        for end in (1, 8, 40, len(file) // 2, len(file) - 30):
            with pytest.raises(RequestError, match=r"can't be decoded|no format"):
                decode_image(base64.b64encode(file[:end]).decode(), "Image 1")


def test_random_damage_is_an_image_or_an_error_of_the_request() -> None:
    generator = np.random.default_rng(5)
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        file = np.frombuffer(base64.b64decode(png(SEEN, form)), dtype=np.uint8)
        for _ in range(60):
            damaged = file.copy()
            damaged[generator.integers(0, len(file), 3)] = generator.integers(0, 256, 3)
            data = base64.b64encode(io.BytesIO(damaged.tobytes()).getvalue()).decode()
            try:
                assert decode_image(data, "Image 1").mode == "RGB"
            except RequestError as error:
                assert error.status in (400, 413)


def processed(number: int, num_bytes: int = 100) -> ProcessedImage:
    return ProcessedImage(bytes([number]) * 32, (1, 3, 2, 2), (0, 0), (4,), num_bytes, bytes(48))


def test_images_without_users_stay_within_a_number_of_bytes() -> None:
    sent: list[object] = []
    images = SentImages(sent.append, max_idle_bytes=250, max_used_bytes=1000)
    three = [processed(number, 100) for number in range(3)]
    for one in (*three, three[0]):
        images.check_room([one])
        images.use(one)
    assert len(sent) == 3, "an image is sent once"
    for one in three:
        images.release(one.key)
    assert images.has(three[0].key) and len(sent) == 3, "it has a user still"
    images.release(three[0].key)
    assert not images.has(three[1].key) and images.has(three[0].key), "the oldest goes"
    messages = len(sent)
    images.use(three[0])
    images.release(three[0].key)
    assert len(sent) == messages, "it was there still, and counts once"
    assert images.has(three[2].key)
    large = processed(7, 800)
    images.check_room([large])
    images.use(large)
    images.check_room([large])
    with pytest.raises(RequestError, match="too many images") as full:
        images.check_room([processed(8, 300)])
    assert full.value.status == 503 and full.value.retry_after_s
    images.check_room([processed(8, 200)])


def test_an_image_for_idle_times_is_hurried_by_the_first_other_answer() -> None:
    sent: list[Any] = []
    images, one, other = SentImages(sent.append, max_idle_bytes=150), *map(processed, (1, 2))
    for idle in ("expected", "arriving", "", ""):
        images.use(one, idle)
    assert [type(message) for message in sent] == [LoadImage, HurryImage]
    assert sent[0].idle == "expected" and sent[1].key == one.key
    images.use(other)
    images.use(other, "expected")
    assert len(sent) == 3 and sent[2].idle == ""
    images = SentImages(sent.append, max_idle_bytes=150)
    sent.clear()
    for image in (one, other):  # the second drops the first
        images.use(image, "expected")
        images.release(image.key)
    images.use(one)
    assert [type(message) for message in sent] == [LoadImage, LoadImage, DropImage, LoadImage]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pixel_processor(tmp_path_factory.mktemp("pixels"))


def test_large_tensors_go_to_workers_on_this_machine_in_files(folder: Path, tmp_path: Path) -> None:
    large, sent = picture(3, 600, 600), list[Any]()
    values = np.asarray(large, dtype="<f4").transpose(2, 0, 1).tobytes()

    def prepared(image: Image.Image, files: Path | None = tmp_path) -> ProcessedImage:
        with free_preparer() as preparer:
            return preparer.prepare(png(image).encode(), "", folder, PIXELS, files=files)

    for one in (prepared(picture(3)), prepared(large, None), prepared(large, tmp_path / "missing")):
        assert one.file is None and len(one.pixels) == one.num_bytes
    assert one.pixels == values
    assert not list(tmp_path.iterdir())
    image = prepared(large)
    for by_file in (True, True, False):
        SentImages(sent.append, by_file=by_file).use(image)
    local, another, joined = sent
    assert not local.pixels and not another.pixels and local.file != another.file
    assert not joined.file and joined.pixels == values
    Path(another.file).unlink()
    del image
    assert [str(one) for one in tmp_path.iterdir()] == [local.file], "its reader removes it"
    assert Path(local.file).read_bytes() == values


class TakesASecond:
    """Stands for a preparer."""

    def prepare(self, data: bytes, *_: Any, budget: CpuBudget, **__: Any) -> ProcessedImage:
        budget.left -= 1
        return processed(len(data) % 256)


def test_all_images_of_a_request_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is kept takes none."""
    monkeypatch.setattr(places, "CpuBudget", lambda: CpuBudget(1.5))
    monkeypatch.setattr(
        kept_images, "free_preparer", lambda: contextlib.nullcontext(TakesASecond())
    )
    placer = ImagePlacer(KeptImages(Path(), PIXELS), "<image>")

    def process(*numbers: int) -> list[ProcessedImage]:
        parts = [{"type": "image", "data": png(picture(number))} for number in numbers]
        return placer.process(parts, 1000)

    assert len(process(1, 2)) == 2
    assert len(process(1, 2, 3, 4)) == 4
    with pytest.raises(RequestError, match=r"Image 4 is not decoded: .* CPU time") as refused:
        process(5, 1, 6, 7)
    assert refused.value.status == 400


def test_large_images_are_kept_in_files_beside_the_memory_of_the_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_images, "KEPT_IMAGE_BYTES", 1 << 20)
    images = KeptImages(folder, PIXELS, files=tmp_path)
    small, large = png(picture(1)), png(picture(2, 700, 700))
    found = [images.process(one, "") for one in (small, large)]
    assert [one.file is not None for one in found] == [False, True]
    assert [images.process(one, "") for one in (small, large)] == found


def test_an_explanation_counts_images_and_not_their_tiles() -> None:
    runs = [ImageRun(b"a", 2, 4), ImageRun(b"a", 7, 4, 4), ImageRun(b"b", 12, 4)]
    record = PromptRecord("id", "", b"", None, images=runs)
    found = [record.image_at(index) for index in (1, 2, 8, 11, 12, 16)]
    assert found == [None, 1, 1, None, 2, None]


@pytest.mark.parametrize("page_size", [SHORTEST_PAGE - 1, SHORTEST_PAGE])
def test_images_with_small_pages_are_refused(page_size: int) -> None:
    """31 bits a token tell too few pages of images apart."""
    vocabulary: Any = SimpleNamespace(special_tokens={7: SimpleNamespace(content="<image>")})
    info = engine_info(vision=PIXELS, page_size=page_size)
    placer = ImagePlacer.for_engine(info, ServerConfig(), vocabulary)
    assert (placer is None) is (page_size < SHORTEST_PAGE)
    assert f"--page-size {SHORTEST_PAGE} or more" in NO_PLACEHOLDER
