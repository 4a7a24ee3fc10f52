"""Turns images into the tensors that the vision tower reads, by the checkpoint's own processor of
transformers (the one of Pillow and NumPy), and names each by its digest."""

import functools
import hashlib
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixrt.base.errors import RequestError
from radixrt.messages.ids import TokenIds
from radixrt.messages.images import ImageKey, LoadImage, VisionInfo, image_key_ids
from radixrt.messages.requests import IdleKind
from radixrt.tokenizer.fair_queue import goes_on
from radixrt.tokenizer.images.decoder import CpuBudget, free_decoder
from radixrt.tokenizer.images.decoding import DEFAULT_LIMITS, ImageLimits
from radixrt.tokenizer.images.families import FAMILIES, Grid
from radixrt.tokenizer.images.tensor_file import TensorFile, put_into_file
from radixrt.tokenizer.prompt.kept_answers import TokenMemory

KEPT_BYTES = 128 << 20
"""Memory of the tensors of the last images, for their next turns."""
KEPT_FILE_BYTES = 512 << 20
"""Files of the large ones of them."""


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the tower reads it."""

    key: ImageKey
    pixels: NDArray[np.float32]
    """See ``LoadImage.shape``."""
    grid: Grid
    runs: tuple[int, ...]
    """Placeholders of each tile."""
    num_bytes: int
    """Memory in a worker: of the pixels, or of the features if they take more."""
    file: TensorFile | None = None
    """Has the pixels, if they are many."""

    @property
    def num_tokens(self) -> int:
        """Placeholders of all tiles."""
        return sum(self.runs)

    def load_order(self, *, by_file: bool = False, idle: IdleKind = "") -> LoadImage:
        """The message that brings it to the workers.

        Args:
            by_file: these are on this machine.
        """
        pixels, file = b"", ""
        if by_file and self.file is not None:
            file = self.file.link()
        else:
            pixels = self.pixels.astype("<f4", copy=False).tobytes()
        return LoadImage(key=self.key, pixels=pixels, shape=self.pixels.shape, file=file, idle=idle)

    @functools.cached_property
    def key_ids(self) -> TokenIds:
        """The ids of its placeholders, where prefixes are compared: [num_tokens]"""
        return image_key_ids(self.key, 0, self.num_tokens)


class ImageProcessor:
    """The processor of one checkpoint. Safe to use from several threads.

    Args:
        folder: of the checkpoint.
        files: folder for large tensors; None: they stay in memory.
    """

    def __init__(
        self,
        folder: Path,
        vision: VisionInfo,
        limits: ImageLimits = DEFAULT_LIMITS,
        files: Path | None = None,
    ) -> None:
        self.vision = vision
        self.limits = limits
        self._folder, self._files = folder, files
        self._memory: TokenMemory[ProcessedImage] = TokenMemory(KEPT_BYTES)
        self._in_files: TokenMemory[ProcessedImage] = TokenMemory(KEPT_FILE_BYTES)
        self._lock = threading.Lock()

    @functools.cached_property
    def _processor(self) -> Any:
        """Made for the first image: transformers imports torch for it, which takes seconds."""
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(
            self._folder, backend="pil", local_files_only=True
        )

    @functools.cached_property
    def _settings(self) -> bytes:
        """SHA-256 over the processor's settings."""
        settings = self._processor.to_dict()
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).digest()

    def prepare(self) -> None:
        """Load the processor ahead of the first image.

        Raises:
            RequestError: it can't be loaded.
        """
        with self._lock:
            try:
                self._settings  # noqa: B018 (made on first use)
            except Exception as error:  # transformers raises many kinds
                reason = " ".join(str(error).split())
                raise RequestError(
                    f"The server can't prepare images: the checkpoint's image processor can't be loaded ({reason[:300]}).",
                    status=500,
                ) from error

    def process(self, data: str, where: str, budget: CpuBudget | None = None) -> ProcessedImage:
        """
        Args:
            data: the file in base64.
            where: names the image in errors.
            budget: of the request.

        Raises:
            RequestError: it can't be decoded, is too large, or the budget is used up.
        """
        self.prepare()
        content = data.encode(errors="surrogatepass")
        file_key = hashlib.sha256(content).digest()
        found = self._memory.find(file_key) or self._in_files.find(file_key)
        if found is None:
            budget = budget or CpuBudget()
            budget.check(where)
            with free_decoder() as decoder:
                image = decoder.decode(content, where, self.limits, budget)
            goes_on()
            begin = time.thread_time()
            try:
                found = self._process(image)
            except ValueError as error:  # as Qwen's does at strips
                raise RequestError(
                    f"{where} can't be prepared for this model: {str(error)[:200]}.",
                    param="messages",
                    code="invalid_image",
                ) from error
            budget.left -= time.thread_time() - begin
            memory = self._memory if found.file is None else self._in_files
            memory.keep(file_key, found, found.pixels.nbytes)
        return found

    def _process(self, image: Any) -> ProcessedImage:
        family, vision = FAMILIES[self.vision.family], self.vision
        options = {"patch_size": vision.unit} if family.patch_is_unit else family.options
        outputs = self._processor(image, return_tensors="np", **options)
        values = np.ascontiguousarray(outputs["pixel_values"], dtype=np.float32)
        if (shape := _patches(outputs)) is not None:
            rows, columns = shape
            values = values.reshape(-1, values.shape[-1])[: rows * columns]
            values = values.reshape(1, rows, columns, -1)
            grid = rows // vision.unit, columns // vision.unit
        else:
            values = values.reshape(-1, *values.shape[-3:])
            grid = _grid(outputs)
            if vision.unit:
                grid = values.shape[2] // vision.unit, values.shape[3] // vision.unit
        runs = (vision.tokens_per_tile,) * len(values)
        if family.runs_of is not None:
            runs = family.runs_of(grid)
        goes_on()
        key = self._digest(values)
        file = None if self._files is None else put_into_file(self._files, values)
        return ProcessedImage(
            key=key,
            pixels=values if file is None else file.values,
            grid=grid,
            runs=runs,
            num_bytes=max(values.nbytes, sum(runs) * vision.feature_bytes),
            file=file,
        )

    def _digest(self, values: NDArray[np.float32]) -> ImageKey:
        hashed = hashlib.sha256(f"{values.dtype.str} {values.shape}\n".encode())
        hashed.update(values.data)
        hashed.update(self._settings)
        hashed.update(self.vision.weights)
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
