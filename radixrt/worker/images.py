"""Runs the vision tower, in pieces between the steps, and keeps the features of images.

An image is computed once, alone and always in the same pieces, so its features have the same bits
whatever runs beside it. They stay until the tokenizer process, which counts the users, drops the
image.
"""

import logging
import math
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixrt.messages.images import (
    DropImage,
    HurryImage,
    ImageKey,
    ImageLoaded,
    LoadImage,
    VisionInfo,
)
from radixrt.models.vision.sees import ImageRows, SeesImages
from radixrt.models.vision.tower import Pieces
from radixrt.worker.image_positions import ImagePart

log = logging.getLogger(__name__)

BESIDE_STEPS_S = 0.02
"""Time of the tower between two steps of running answers, if a step has no bound of its own. The
last piece may end later: it is up to 256 patches of a part of a layer."""

QUIET_S = 0.02
"""Seconds without work for idle times behind a step, as in the scheduler."""

SHARE_OF_STEP = 0.5
"""The tower's part of the longest step that answers may wait for (``--max-step-ms``)."""


def vision_info(model: Any) -> VisionInfo | None:
    """What the tokenizer process needs to know of a model's tower; None: it has none."""
    if not isinstance(model, SeesImages) or model.vision is None:
        return None
    vision = model.vision
    return VisionInfo(
        family=vision.family,
        weights=model.vision_digest,
        tokens_per_tile=vision.tokens_per_tile,
        tile_size=vision.tile_size,
        whole_images=vision.whole_images,
        unit=vision.unit,
        has_axes=vision.has_axes,
        image_token=model.whole_config.image_token_id,
        feature_bytes=vision.feature_layers * model.config.hidden_size * model.dtype.itemsize,
    )


class ImageFeatures:
    """The images that were ordered: their features, or their pixels until these are computed.

    Args:
        max_step_s: seconds that a step may take while answers run.
        idle_share: of an idle server's time, for images of expected prompts.
    """

    def __init__(
        self, model: SeesImages, max_step_s: float = math.inf, idle_share: float = 1.0
    ) -> None:
        self.model = model
        self._features: dict[ImageKey, Tensor] = {}
        """[placeholders, feature_layers * hidden_size] of each image."""
        self._ordered: OrderedDict[ImageKey, LoadImage] = OrderedDict()
        """Images whose features are not computed, the oldest first; it may be half done."""
        self._ahead: OrderedDict[ImageKey, LoadImage] = OrderedDict()
        """Those for idle times."""
        self._begun: dict[ImageKey, Pieces] = {}
        """The computations that are half done."""
        self._idle_share = idle_share
        self._rests_until = 0.0
        self.beside_steps_s = min(BESIDE_STEPS_S, SHARE_OF_STEP * max_step_s)
        """Seconds of :meth:`work` between two steps."""
        self.num_computed = 0
        """Images on which the tower was run."""

    @property
    def whole(self) -> bool:
        """Whether the tokens of an image see one another in both directions."""
        return self.model.vision is not None and self.model.vision.whole_images

    @property
    def has_work(self) -> bool:
        """Whether features are to be computed now."""
        return bool(self._ordered)

    @property
    def has_idle_work(self) -> bool:
        """Whether features are to be computed in idle times."""
        return bool(self._ahead)

    def seconds_to_rest(self) -> float:
        """Time until the next piece for idle times; 0: it is due."""
        return max(0.0, self._rests_until - time.perf_counter())

    def rest(self, seconds: float) -> None:
        """Compute nothing for idle times for so long: a step has ended."""
        self._rests_until = max(self._rests_until, time.perf_counter() + seconds)

    def order(self, message: LoadImage | HurryImage | DropImage) -> None:
        """Note an image whose features are wanted, or forget one."""
        match message:
            case LoadImage(idle=idle):
                (self._ahead if idle else self._ordered)[message.key] = message
            case HurryImage():
                if (load := self._ahead.pop(message.key, None)) is not None:
                    self._ordered[message.key] = load
            case DropImage():  # comes when every rank has answered the load
                self._features.pop(message.key, None)

    def work(self, seconds: float) -> list[ImageLoaded]:
        """Compute pieces for about ``seconds``, at least one. Returns the images that are ready."""
        return self._work(self._ordered, seconds)

    def work_ahead(self, seconds: float) -> list[ImageLoaded]:
        """The same for idle times. Work on expected prompts is followed by a rest."""
        _, first = next(iter(self._ahead.items()))
        begin = time.perf_counter()
        loaded = self._work(self._ahead, seconds)
        if first.idle == "expected" and self._idle_share:
            self.rest((time.perf_counter() - begin) * (1 / self._idle_share - 1))
        return loaded

    @torch.inference_mode()
    def _work(self, ordered: OrderedDict[ImageKey, LoadImage], seconds: float) -> list[ImageLoaded]:
        end, loaded = time.perf_counter() + seconds, []
        while ordered:
            key, message = next(iter(ordered.items()))
            try:
                if key not in self._begun:
                    assert self.model.vision is not None
                    self._begun[key] = self.model.vision.pieces(self._pixels(message))
                next(self._begun[key])
            except StopIteration as done:
                loaded.append(self._finish(key, done.value))
            except OSError as error:
                log.warning("The file of an image can't be read: %s.", error)
                reason = f"The file of an image can't be read ({error.strerror})."
                loaded.append(self._finish(key, None, reason))
            except (RuntimeError, ValueError) as error:
                log.exception("The vision tower failed.")
                reason = f"The vision tower failed on an image ({error})."
                loaded.append(self._finish(key, None, reason))
            if time.perf_counter() >= end:
                break
        return loaded

    def _pixels(self, message: LoadImage) -> Tensor:
        """[tiles, channels, height, width] float32"""
        if message.file:
            return torch.from_numpy(np.memmap(message.file, "<f4", "c", shape=message.shape))
        sent = np.frombuffer(message.pixels, dtype="<f4").reshape(message.shape)
        return torch.from_numpy(sent.copy())

    def _finish(
        self, key: ImageKey, features: Tensor | None, error: str | None = None
    ) -> ImageLoaded:
        self._begun.pop(key, None)
        self._ordered.pop(key, None)
        self._ahead.pop(key, None)
        if features is not None:
            self._features[key] = features
            self.num_computed += 1
        return ImageLoaded(key=key, error=error)

    def rows(self, parts: list[ImagePart]) -> ImageRows:
        """The features for the placeholders of a step, of which there are some."""
        rows = [torch.arange(part.row, part.row + part.num_tokens) for part in parts]
        features = [
            self._features[part.image][part.first : part.first + part.num_tokens] for part in parts
        ]
        axes = [part.axes for part in parts if part.axes is not None]
        return ImageRows(
            torch.cat(rows),
            torch.cat(features),
            torch.from_numpy(np.concatenate(axes, axis=1)) if axes else None,
        )
