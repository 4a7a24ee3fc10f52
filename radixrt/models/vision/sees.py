"""Decoders that see images: a tower and a projector beside the language model."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.parallel import TensorParallel
from radixrt.models.decoder import LanguageModelOnly
from radixrt.models.vision.tower import Pieces, tower_name


class ImageRows(NamedTuple):
    """Embeddings that stand in the place of those of tokens."""

    rows: Tensor  # [n] int64, of the flat batch
    features: Tensor  # [n, feature_layers * hidden_size]
    axes: Tensor | None = None
    """[3, n] int64, positions in time, height and width; None: those of the step."""


class ImageEncoder(nn.Module):
    """The tower and the projector of a family."""

    family: str
    tokens_per_tile: int = 0
    """Placeholders of one picture; 0: pictures have sizes of their own."""
    tile_size: int = 0
    """Height and width of a picture, in pixels; 0 with those sizes."""
    unit: int = 0
    """With sizes of their own: rows and columns of an image's tensor for one placeholder."""
    feature_layers: int = 1
    """The embedding, and further vectors of its size that are added to the outputs of the first
    layers of the language model (DeepStack)."""
    has_axes = False
    """Placeholders have positions in three axes (M-RoPE)."""
    whole_images = False
    """The placeholders of a picture see one another in both directions."""

    @abstractmethod
    def tile_pieces(self, pixels: Tensor) -> Pieces:
        """[channels, height, width] float32 of one picture -> [its placeholders, feature_layers *
        hidden_size]"""

    def pieces(self, pixels: Tensor) -> Pieces:
        """The features of an image: [tiles, channels, height, width] float32 -> [placeholders,
        feature_layers * hidden_size]"""
        parts = []
        for tile in pixels:
            parts.append((yield from self.tile_pieces(tile)))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class SeesImages(LanguageModelOnly):
    """Before the class of a language model: that of a checkpoint that sees images. Without
    :meth:`add_encoder` it is the language model alone."""

    projector, tower = "multi_modal_projector.", "vision_tower."
    """Prefixes of the names of their tensors in a checkpoint, behind ``model.``."""

    def __init__(self, config: Any, tp: TensorParallel, context_length: int) -> None:
        super().__init__(config, tp, context_length)
        self.whole_config = config
        self.vision: ImageEncoder | None = None
        self.vision_digest = b""
        """SHA-256 over the weights of ``vision``; set by the loader."""

    @abstractmethod
    def make_encoder(self, config: Any) -> ImageEncoder:
        """The tower and projector of a checkpoint's config.

        Raises:
            ConfigError: they are of a form that is not served.
        """

    def vision_name(self, name: str) -> str | None:
        """The name in ``vision`` of a checkpoint's tensor; "": it is not needed; None: it belongs
        to the language model."""
        name = name.removeprefix("model.")
        if name.startswith(self.projector):
            return name.removeprefix(self.projector)
        if not name.startswith(self.tower):
            return None
        inner = tower_name(name.removeprefix(self.tower))
        return self.tower + inner if self.reads(inner) else ""

    def reads(self, inner: str) -> bool:
        """Whether a tensor of the tower, under our name, has a part in the features."""
        return True

    def add_encoder(self) -> None:
        """See images; before the weights are loaded."""
        self.vision = self.make_encoder(self.whole_config)

    @torch.inference_mode()
    def forward_with_images(
        self,
        input_ids: Tensor,
        positions: Tensor,
        context: ForwardContext,
        rows: Tensor | None,
        images: ImageRows,
    ) -> Tensor:
        """``CausalLM.forward`` of tokens among which images are."""
        first, *others = images.features.split(self.config.hidden_size, dim=1)
        hidden = self.embed(input_ids).index_copy(0, images.rows, first)

        def add_others(layer: int, output: Tensor) -> Tensor:
            return (
                output.index_add(0, images.rows, others[layer]) if layer < len(others) else output
            )

        with self._at(positions, images):
            hidden, residual = self._attend_all(hidden, positions, context, add_others)
        if rows is not None:
            hidden, residual = hidden[rows], residual[rows]
        return self.after_last_attention(hidden, residual)

    def _at(self, positions: Tensor, images: ImageRows) -> AbstractContextManager[None]:
        """Within, queries and keys rotate by the positions of tokens and images."""
        return nullcontext()

    def translate(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        inner = self.vision_name(name)
        if inner is None:
            yield from super().translate(name, tensor)
        elif inner and self.vision is not None:
            yield f"vision.{inner}", tensor
