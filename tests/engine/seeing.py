"""A checkpoint that sees images in the engine, beside transformers."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from radixrt.base.config import ServerConfig
from radixrt.messages.images import VisionInfo
from radixrt.messages.requests import ChatPrompt
from radixrt.tokenizer.images.kept_images import KeptImages
from radixrt.tokenizer.images.places import ImagePlacer
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import EncodedPrompt, PromptEncoder
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.checkpoints.image_checkpoints import (
    OWN_SIZES,
    VOCAB_SIZE,
    OwnSizes,
    make_image_checkpoint,
)
from tests.engine.in_process import InProcessEngine

LIMITS = Limits(1024, 4096, VOCAB_SIZE)

Chat = list[dict[str, Any]]


class Sees:
    """A checkpoint that sees images: the engine's encoder of prompts, and transformers'."""

    def __init__(self, family: str, folder: Path, served: Callable[[Path], Path] = Path) -> None:
        self.family = family
        self.folder = make_image_checkpoint(family, folder)
        self.served = served(self.folder)
        vision = self.engine().info.vision
        assert isinstance(vision, VisionInfo)
        self.vision = vision
        self.vocabulary = Vocabulary.load(ServerConfig(model_path=str(self.served)))
        self._encoder = self.encoder()

    def encoder(self, files: Path | None = None) -> PromptEncoder:
        """One that puts the tensors of large images into files of a folder."""
        kept = KeptImages(self.served, self.vision, files=files)
        placeholder = self.vocabulary.special_tokens[self.vision.image_token].content
        encoder = PromptEncoder(self.vocabulary)
        encoder.serve_images(ImagePlacer(kept, placeholder), "")
        return encoder

    def engine(self, **settings: Any) -> InProcessEngine:
        return InProcessEngine(self.served, page_size=8, context_length=1024, **settings)

    def encode(self, chat: Chat) -> EncodedPrompt:
        return self._encoder.encode(ChatPrompt(chat), LIMITS)

    @functools.cached_property
    def _transformers(self) -> tuple[Any, Any]:
        """The model and its processor."""
        model = transformers.AutoModelForImageTextToText.from_pretrained(self.folder).eval()
        if self.family in OWN_SIZES:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
            return model, OwnSizes(self.family, tokenizer)
        return model, transformers.AutoProcessor.from_pretrained(self.folder)

    @property
    def processor(self) -> Any:
        """transformers', or what stands for it."""
        return self._transformers[1]

    def reference(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        """transformers' token ids of a chat, and the logits behind it."""
        model, _ = self._transformers
        inputs = self._inputs(chat)
        with torch.inference_mode():
            logits = model(**inputs).logits[0, -1]
        return inputs["input_ids"][0].tolist(), logits.numpy()

    def reference_answer(self, chat: Chat, count: int, model: Any = None) -> list[int]:
        """The tokens that transformers generates, or another model than the checkpoint's."""
        model = self._transformers[0] if model is None else model
        inputs = self._inputs(chat)
        ids = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return ids[0, inputs["input_ids"].shape[1] :].tolist()

    def _inputs(self, chat: Chat) -> Any:
        images = [
            transformers.image_utils.load_image(part["data"])
            for message in chat
            for part in message["content"]
            if isinstance(part, dict) and part["type"] == "image"
        ]
        text = self.processor.apply_chat_template(chat, add_generation_prompt=True)
        return self.processor(
            text=text, images=images or None, return_tensors="pt", add_special_tokens=False
        )
