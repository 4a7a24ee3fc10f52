"""An image as the vision tower reads it."""

import functools
import math
from dataclasses import dataclass

from radixrt.messages.ids import TokenIds
from radixrt.messages.images import ImageKey, LoadImage, VisionInfo, image_key_ids
from radixrt.messages.requests import IdleKind
from radixrt.tokenizer.images.families import FAMILIES, Grid
from radixrt.tokenizer.images.tensor_file import TensorFile


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """The tensor of an image, and what stands for it in a prompt."""

    key: ImageKey
    shape: tuple[int, ...]
    """See ``LoadImage.shape``."""
    grid: Grid
    runs: tuple[int, ...]
    """Placeholders of each tile."""
    num_bytes: int
    """Memory in a worker: of the pixels, or of the features if they take more."""
    pixels: bytes = b""
    """The tensor, float32, little-endian; none, if it is in a file."""
    file: TensorFile | None = None

    @classmethod
    def of_tensor(
        cls,
        vision: VisionInfo,
        key: ImageKey,
        shape: tuple[int, ...],
        grid: Grid,
        tensor: bytes | TensorFile,
    ) -> "ProcessedImage":
        """An image for the tower of a checkpoint."""
        runs_of = FAMILIES[vision.family].runs_of
        runs = (vision.tokens_per_tile,) * shape[0] if runs_of is None else runs_of(grid)
        num_bytes = max(4 * math.prod(shape), sum(runs) * vision.feature_bytes)
        if isinstance(tensor, bytes):
            return cls(key, shape, grid, runs, num_bytes, pixels=tensor)
        return cls(key, shape, grid, runs, num_bytes, file=tensor)

    @property
    def num_tokens(self) -> int:
        """Placeholders of all tiles."""
        return sum(self.runs)

    def load_order(self, *, by_file: bool = False, idle: IdleKind = "") -> LoadImage:
        """The message that brings it to the workers.

        Args:
            by_file: these are on this machine.
        """
        pixels, file = self.pixels, ""
        if self.file is not None:
            if by_file:
                file = self.file.link()
            else:
                pixels = self.file.path.read_bytes()
        return LoadImage(key=self.key, pixels=pixels, shape=self.shape, file=file, idle=idle)

    @functools.cached_property
    def key_ids(self) -> TokenIds:
        """The ids of its placeholders, where prefixes are compared: [num_tokens]"""
        return image_key_ids(self.key, 0, self.num_tokens)
