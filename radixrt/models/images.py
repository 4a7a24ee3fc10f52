"""Decides whether a checkpoint is served with its vision tower. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixrt.base.image_parts import (
    BYTES_OF_A_PIXEL,
    IDLE_IMAGE_BYTES,
    KEPT_IMAGE_BYTES,
    PREPARER_BYTES,
)
from radixrt.models.gguf.folder import gguf_tensors, why_no_tower
from radixrt.models.gguf.form import PROCESSOR_FILE
from radixrt.models.registry import check_architecture, sees_images

PROCESSOR_FILES = (PROCESSOR_FILE, "processor_config.json")
"""Those with the settings of the image processor: transformers 4 writes the first, transformers 5
the second."""

NO_TOWER = "No vision tower lies beside the GGUF file: its mmproj-*.gguf, or --mmproj FILE."


def image_bytes(engines: int, max_pixels: int) -> int:
    """Memory of a server that sees images, beside that for text.

    Args:
        engines: workers, each of which keeps features.
        max_pixels: of one image.
    """
    preparer = PREPARER_BYTES + BYTES_OF_A_PIXEL * max_pixels
    return engines * IDLE_IMAGE_BYTES + KEPT_IMAGE_BYTES + preparer


def why_no_images(model_dir: Path, config: Mapping[str, Any], device: str) -> str | None:
    """A sentence that says why a checkpoint is served without images; None: it sees them.

    Args:
        config: its config.json.
        device: the type of the device that computes, as "cpu".
    """
    architecture = check_architecture(config)
    if not sees_images(architecture):
        if isinstance(config.get("vision_config"), dict):
            return f"Not yet: images for {architecture}; text is served."
        if gguf_tensors(model_dir) is not None:
            reason = why_no_tower(model_dir)
            return f"{reason or NO_TOWER} This model ({architecture}) takes text only."
        return f"This model ({architecture}) has no vision tower; it takes text only."
    if not any((model_dir / name).is_file() for name in PROCESSOR_FILES):
        return (
            "This model's folder lacks preprocessor_config.json, which says how images are prepared; take it from the original "
            "checkpoint. Text is served."
        )
    if device != "cpu":
        return "Not yet: images on a GPU; text is served."
    return None
