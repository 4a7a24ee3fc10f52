"""The tower's work between steps, and the life of features."""

import math
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from radixrt.messages.images import DropImage, HurryImage, LoadImage
from radixrt.messages.requests import IdleKind
from radixrt.scheduler.loaded_parts import ImageRegistry
from radixrt.worker.image_positions import ImagePart
from radixrt.worker.images import BESIDE_STEPS_S, ImageFeatures

PIECES = 4


class Model:
    """Stands for a model whose tower takes some pieces, and fails on negative pixels."""

    dtype = torch.float32
    whole_images = False

    def __init__(self) -> None:
        self.vision = self
        self.worked: list[float] = []
        """The pixel of each image, once a piece."""

    def pieces(self, pixels: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        pixel = float(pixels.flatten()[0])
        for number in range(PIECES):
            self.worked.append(pixel)
            if number:
                yield
        if pixel < 0:
            raise RuntimeError("the pixels are bad")
        return torch.full((2, 3), pixel)


def load(pixel: float, idle: IdleKind = "") -> LoadImage:
    pixels = np.full((1, 3, 1, 1), pixel, dtype="<f4")
    return LoadImage(key=key_of(pixel), pixels=pixels.tobytes(), shape=pixels.shape, idle=idle)


def key_of(pixel: float) -> bytes:
    return f"{pixel:032.0f}".encode()


def features(*pixels: float, **settings: Any) -> ImageFeatures:
    found = ImageFeatures(Model(), **settings)  # type: ignore[arg-type]
    for pixel in pixels:
        found.order(load(pixel))
    return found


def test_the_tower_rests_between_pieces_and_computes_the_oldest_image_first() -> None:
    images = features(1.0, 2.0)
    loaded = [images.work(0.0) for _ in range(2 * PIECES)]
    assert [len(one) for one in loaded] == [0, 0, 0, 1] * 2
    assert [one.key for some in loaded for one in some] == [key_of(1.0), key_of(2.0)]
    assert not images.has_work
    images.order(load(3.0))
    images.order(load(4.0))
    assert [one.key for one in images.work(math.inf)] == [key_of(3.0), key_of(4.0)]


@pytest.mark.parametrize("max_step_s", [math.inf, 0.01])
def test_beside_answers_the_tower_has_a_part_of_the_longest_step(max_step_s: float) -> None:
    images = features(max_step_s=max_step_s)
    assert images.beside_steps_s == (0.005 if max_step_s == 0.01 else BESIDE_STEPS_S)


def test_an_image_on_which_the_tower_fails_is_answered_with_an_error() -> None:
    images = features(-1.0, 2.0)
    bad, good = images.work(math.inf)
    assert bad.key == key_of(-1.0) and bad.error is not None and "the pixels are bad" in bad.error
    assert good.key == key_of(2.0) and good.error is None
    assert images.num_computed == 1 and not images.has_work


def test_features_are_forgotten_with_their_image_alone() -> None:
    images = features(1.0, 2.0)
    images.work(math.inf)
    images.order(DropImage(key_of(1.0)))
    rows = images.rows([ImagePart(key_of(2.0), row=5, first=1, num_tokens=1)])
    assert rows.rows.tolist() == [5] and rows.features.tolist() == [[2.0] * 3]
    with pytest.raises(KeyError):
        images.rows([ImagePart(key_of(1.0), row=0, first=0, num_tokens=1)])
    images.order(load(1.0))
    assert [one.key for one in images.work(math.inf)] == [key_of(1.0)]
    assert images.num_computed == 3


def test_images_for_idle_times_wait_for_the_others_and_for_their_rest() -> None:
    images = features(idle_share=0.25)
    images.order(load(1.0, "expected"))
    assert images.has_idle_work and not images.has_work
    assert images.work_ahead(0.0) == [] and images.model.worked == [1.0] * 2  # type: ignore[attr-defined]
    assert images.seconds_to_rest() > 0, "three times as long as it has worked"
    images.order(load(2.0))
    assert [one.key for one in images.work(math.inf)] == [key_of(2.0)]
    assert not images.has_work and images.has_idle_work
    images.order(HurryImage(key_of(1.0)))
    assert images.has_work and not images.has_idle_work
    assert [one.key for one in images.work(math.inf)] == [key_of(1.0)]
    assert images.model.worked.count(1.0) == PIECES, "it has gone on"  # type: ignore[attr-defined]
    images.order(HurryImage(key_of(1.0)))
    assert not images.has_work
    arriving = features(idle_share=0.25)
    arriving.order(load(3.0, "arriving"))
    assert [one.key for one in arriving.work_ahead(math.inf)] == [key_of(3.0)]
    assert arriving.seconds_to_rest() == 0.0 and not arriving.has_idle_work
    arriving.rest(5.0)
    assert 4.0 < arriving.seconds_to_rest() <= 5.0


def test_an_image_that_waits_survives_the_tokenizer_process_and_its_files(tmp_path: Path) -> None:
    """One that is begun goes on; the next one is read from the file of the next process."""
    registry, images = ImageRegistry(num_ranks=1), features()

    def send(process: str) -> None:
        (tmp_path / process).mkdir()
        for pixel in (1.0, 2.0):
            file = tmp_path / process / f"{pixel}"
            file.write_bytes(load(pixel).pixels)
            registry.load(msgspec.structs.replace(load(pixel), pixels=b"", file=str(file)))
        order()

    def order() -> None:
        for one in registry.take_orders():
            assert isinstance(one, LoadImage | HurryImage | DropImage)
            images.order(one)

    send("0")
    assert images.work(0.0) == []
    shutil.rmtree(tmp_path / "0")
    registry.drop_all()
    send("1")
    while images.has_work:
        for loaded in images.work(math.inf):
            registry.loaded(loaded)
        order()
    assert [registry.refusal(0, key_of(pixel)) for pixel in (1.0, 2.0)] == [None, None]
    rows = images.rows([ImagePart(key_of(pixel), 0, 0, 1) for pixel in (1.0, 2.0)])
    assert rows.features.tolist() == [[1.0] * 3, [2.0] * 3]
    assert images.num_computed == 2 and not list((tmp_path / "1").iterdir())


def test_pixels_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "pixels").write_bytes(load(6.0).pixels)
    images, missing = features(), str(tmp_path / "missing")
    images.order(msgspec.structs.replace(load(6.0), pixels=b"", file=str(tmp_path / "pixels")))
    images.order(msgspec.structs.replace(load(7.0), pixels=b"", file=missing))
    found, failed = images.work(math.inf)
    assert found.error is None
    assert failed.error == "The file of an image can't be read (No such file or directory)."
    assert images.rows([ImagePart(key_of(6.0), 0, 0, 2)]).features.tolist() == [[6.0] * 3] * 2
