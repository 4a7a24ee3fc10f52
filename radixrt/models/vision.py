"""Checkpoints of models that also see images or hear, of which the language model alone is
served."""

from collections.abc import Iterator

from torch import Tensor

_OTHER_PARTS = (
    "model.visual.",
    "vision_tower.",
    "multi_modal_projector.",
    "audio_tower.",
    "vision_embedder.",
    "embed_vision.",
    "embed_audio.",
)


def language_model_only(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Drop the tensors of vision and audio; strip the language model's prefix:
    ``language_model.model.`` or ``model.language_model.``"""
    if any(part in name for part in _OTHER_PARTS):
        return
    name = name.replace("model.language_model.", "model.", 1)
    yield name.removeprefix("language_model."), tensor
