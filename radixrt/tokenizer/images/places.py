"""Puts the images of a chat into its rendered text, and those of any prompt in the place of their
placeholders among its tokens.

The text has one placeholder for each tile. A placeholder is a special token, so it is encoded
alone, and repeating its id for all of a tile's positions gives the ids of the text in which it is
repeated. The number of repetitions is the image's own, so the places and their lengths go together
(:class:`Tile`).
"""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError
from radixrt.messages.answers import EngineInfo
from radixrt.messages.ids import TokenIds
from radixrt.messages.images import SHORTEST_PAGE, ImageRun, VisionInfo
from radixrt.tokenizer.fair_queue import goes_on
from radixrt.tokenizer.images.decoding import ImageLimits
from radixrt.tokenizer.images.families import FAMILIES
from radixrt.tokenizer.images.kept_images import KeptImages
from radixrt.tokenizer.images.preparer import CpuBudget
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.images.spread import Spread
from radixrt.tokenizer.prompt.breakpoints import substitute
from radixrt.tokenizer.prompt.chat_template import RenderedChat
from radixrt.tokenizer.vocabulary import Vocabulary

NO_PLACEHOLDER = f"Images need --page-size {SHORTEST_PAGE} or more, and a tokenizer with a special token for them."
"""Why images are refused although the model has a tower."""


class Tile(NamedTuple):
    """A placeholder in a text."""

    image: ProcessedImage
    first: int
    """Row of the image's features for its first position."""
    num_tokens: int


class ImagePlacer:
    """Places the images of chats for one checkpoint.

    Args:
        kept: makes the tensors.
        placeholder: the special token of an image's positions.
    """

    def __init__(self, kept: KeptImages, placeholder: str) -> None:
        self.vision: VisionInfo = kept.vision
        self._kept = kept
        self._placeholder = placeholder
        self._family = FAMILIES[self.vision.family]
        self._mark = re.compile(re.escape(self._family.mark or placeholder))

    @classmethod
    def for_engine(
        cls,
        info: EngineInfo,
        config: ServerConfig,
        vocabulary: Vocabulary,
        files: Path | None = None,
    ) -> "ImagePlacer | None":
        """Places images for the tower of an engine; None: it has none, its pages are too small, or
        there is no token for images.

        Args:
            files: folder for the tensors of large images.
        """
        if info.vision is None or info.page_size < SHORTEST_PAGE:
            return None
        placeholder = vocabulary.special_tokens.get(info.vision.image_token)
        if placeholder is None:
            return None
        limits = ImageLimits(config.max_images, config.max_image_pixels, config.max_image_mib << 20)
        kept = KeptImages(Path(config.model_path), info.vision, limits, files)
        return cls(kept, placeholder.content)

    def prepare(self) -> None:
        """Load the processor ahead of the first image. An error is the request's that needs it."""
        with contextlib.suppress(RequestError):
            self._kept.load()

    def process(self, parts: Sequence[dict[str, Any]], most_tokens: int) -> list[ProcessedImage]:
        """The images of a prompt.

        Args:
            parts: hold them, see :mod:`radixrt.messages.prompt_images`.
            most_tokens: of a prompt.

        Raises:
            RequestError: an image can't be decoded, there are too many, or they take too much time.
            NobodyWaits: the request is not wanted any more.
        """
        most = min(self._kept.limits.images, most_tokens // (self.vision.tokens_per_tile or 1))
        if len(parts) > most:
            raise RequestError(
                f"The request has {len(parts)} images; at most {most} are taken (--max-images, or the context). Leave some out.",
                param="messages",
                code="context_length_exceeded",
            )
        images: list[ProcessedImage] = []
        budget = CpuBudget()
        for number, part in enumerate(parts, 1):
            where = f"Image {number}"
            if "data" not in part:
                raise RequestError(
                    f"{where} has an address, which is fetched for answers only; send a data URL.",
                    param="messages",
                )
            images.append(self._kept.process(part["data"], where, budget))
            goes_on()
            if (found := sum(image.num_tokens for image in images)) > most_tokens:
                raise RequestError(
                    f"The first {number} images have {found} tokens; the model takes {most_tokens}. Leave some out, or scale "
                    "them down.",
                    param="messages",
                    code="context_length_exceeded",
                )
        return images

    def place(self, chat: RenderedChat, images: Sequence[ProcessedImage]) -> RenderedChat:
        """A rendered chat with each image in the place of its mark.

        Raises:
            RequestError: the template has not written a mark for each.
        """
        if (found := len(self._mark.findall(chat.text))) != len(images):
            raise RequestError(
                f"The model's chat template has a place for {found} of the {len(images)} images: it may take images in messages of "
                "the user only.",
                param="messages",
            )
        remaining = iter(images)
        ends, spans = chat.answer_ends, chat.spans
        text, lengths = substitute(
            self._mark,
            lambda _: self._family.text_of(self._placeholder, next(remaining).grid),
            chat.text,
            [*chat.agreed, *ends, *(place for span in spans for place in span)],
        )
        agreed, lengths = lengths[: len(chat.agreed)], lengths[len(chat.agreed) :]
        ends, places = lengths[: len(ends)], lengths[len(ends) :]
        return dataclasses.replace(
            chat,
            text=text,
            agreed=agreed,
            answer_ends=ends,
            spans=list(zip(places[::2], places[1::2], strict=True)),
        )

    @staticmethod
    def tiles(images: Sequence[ProcessedImage]) -> list[Tile]:
        """The placeholders of images in a text, in order."""
        return [
            Tile(image, sum(image.runs[:index]), count)
            for image in images
            for index, count in enumerate(image.runs)
        ]

    def spread(self, tiles: Sequence[Tile]) -> Spread:
        """What repeats the placeholders of a text for the positions of its tiles."""
        return Spread(self.vision.image_token, [tile.num_tokens for tile in tiles])

    def runs(self, ids: TokenIds, tiles: Sequence[Tile]) -> list[ImageRun] | None:
        """The places of the tiles in a prompt that is spread: [n] int32. None: the prompt does not
        have their placeholders, each tile's side by side, and no others."""
        places = np.flatnonzero(ids == self.vision.image_token)
        lengths = np.array([tile.num_tokens for tile in tiles])
        ends = np.cumsum(lengths)
        if len(places) != ends[-1]:
            return None
        first = places[ends - lengths]
        if (places[ends - 1] - first + 1 != lengths).any():
            return None
        starts, has_axes = first.tolist(), self.vision.has_axes
        return [
            ImageRun(
                tile.image.key,
                start,
                tile.num_tokens,
                tile.first,
                tile.image.grid[1] if has_axes else 0,
            )
            for tile, start in zip(tiles, starts, strict=True)
        ]

    @staticmethod
    def key_ids(ids: TokenIds, runs: Sequence[ImageRun], tiles: Sequence[Tile]) -> TokenIds:
        """The ids up to the last image by which prefixes are compared."""
        end = runs[-1].start + runs[-1].num_tokens
        keys = ids[:end].copy()
        for run, tile in zip(runs, tiles, strict=True):
            own = tile.image.key_ids[run.first : run.first + run.num_tokens]
            keys[run.start : run.start + run.num_tokens] = own
        return keys
