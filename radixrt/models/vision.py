"""Checkpoints of models that also see images, of which the language model alone is served."""

from collections.abc import Iterator

from torch import Tensor


def language_model_only(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Drop the vision part's tensors; strip the language model's prefix: ``language_model.model.`` or ``model.language_model.``"""
    if "vision_tower." in name or "multi_modal_projector." in name:
        return
    name = name.replace("model.language_model.", "model.", 1)
    yield name.removeprefix("language_model."), tensor
