"""Turns decoded images into the tensors that the vision tower reads, by the checkpoint's own processor
of transformers (the one of Pillow and NumPy), and names each by its digest."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixrt.messages.images import ImageKey, VisionInfo
from radixrt.tokenizer.images.families import FAMILIES, Grid


class ImageTensor(NamedTuple):
    """An image as the tower reads it."""

    values: NDArray[np.float32]
    """See ``LoadImage.shape``."""
    grid: Grid


class ImageProcessor:
    """The processor of one checkpoint.

    Args:
        folder: of the checkpoint.

    Raises:
        Exception: it can't be loaded; transformers raises many kinds.
    """

    def __init__(self, folder: Path, vision: VisionInfo) -> None:
        from transformers import AutoImageProcessor

        self._vision = vision
        self._processor = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True
        )
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        self._settings = hashlib.sha256(settings.encode()).digest()

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def of(folder: Path, vision: VisionInfo) -> "ImageProcessor":
        """One that is kept for the next images."""
        return ImageProcessor(folder, vision)

    def process(self, image: Any) -> ImageTensor:
        """
        Args:
            image: of Pillow, in RGB.

        Raises:
            ValueError: the processor takes no such image, as Qwen's no strips.
        """
        family, vision = FAMILIES[self._vision.family], self._vision
        options = {"patch_size": vision.unit} if family.patch_is_unit else family.options
        outputs = self._processor(image, return_tensors="np", **options)
        values = np.ascontiguousarray(outputs["pixel_values"], dtype=np.float32)
        if (shape := _patches(outputs)) is not None:
            rows, columns = shape
            values = values.reshape(-1, values.shape[-1])[: rows * columns]
            values = values.reshape(1, rows, columns, -1)
            return ImageTensor(values, (rows // vision.unit, columns // vision.unit))
        values = values.reshape(-1, *values.shape[-3:])
        if vision.unit:
            _, _, height, width = values.shape
            return ImageTensor(values, (height // vision.unit, width // vision.unit))
        return ImageTensor(values, _grid(outputs))

    def key(self, values: NDArray[np.float32]) -> ImageKey:
        """The digest of a tensor."""
        hashed = hashlib.sha256(f"{values.dtype.str} {values.shape}\n".encode())
        hashed.update(values.data)
        hashed.update(self._settings)
        hashed.update(self._vision.weights)
        return hashed.digest()


def _patches(outputs: Any) -> tuple[int, int] | None:
    """Rows and columns of the patches, where each is a row of ``pixel_values``, maybe with padding
    behind them; None: these are pictures."""
    if "image_grid_thw" in outputs:
        _, rows, columns = np.ravel(outputs["image_grid_thw"]).tolist()
        return rows, columns
    if "image_position_ids" in outputs:
        columns, rows = np.reshape(outputs["image_position_ids"], (-1, 2)).max(0).tolist()
        return rows + 1, columns + 1
    return None


def _grid(outputs: Any) -> Grid:
    if "num_crops" in outputs:
        return 1, int(np.ravel(outputs["num_crops"])[0])
    if "rows" not in outputs:
        return 0, 0
    return int(np.ravel(outputs["rows"])[0]), int(np.ravel(outputs["cols"])[0])
