"""Images in the engine: their features are those of transformers, and prefixes with images are
cached like text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from radixrt.base.config import ServerConfig
from radixrt.messages.images import VisionInfo
from radixrt.messages.requests import ChatPrompt, PoolingRequest
from radixrt.tokenizer.images.places import ImagePlacer
from radixrt.tokenizer.images.processor import ImageProcessor
from radixrt.tokenizer.limits import Limits
from radixrt.tokenizer.prompt.prompts import EncodedPrompt, PromptEncoder
from radixrt.tokenizer.vocabulary import Vocabulary
from tests.engine.in_process import InProcessEngine
from tests.image_checkpoints import FAMILIES, VOCAB_SIZE, make_image_checkpoint, picture, user

EVERY = PoolingRequest(logits_of=tuple(range(VOCAB_SIZE)))
LIMITS = Limits(1024, 4096, VOCAB_SIZE)

Chat = list[dict[str, Any]]


class Sees:
    """A checkpoint that sees images: the engine's encoder of prompts, and transformers'."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = make_image_checkpoint(family, folder)
        self._encoder: PromptEncoder | None = None

    def engine(self, **settings: Any) -> InProcessEngine:
        engine = InProcessEngine(self.folder, page_size=8, context_length=1024, **settings)
        if self._encoder is None:
            vision = engine.info.vision
            assert isinstance(vision, VisionInfo)
            config = ServerConfig(model_path=str(self.folder))
            vocabulary = Vocabulary.load(config)
            placeholder = vocabulary.special_tokens[vision.image_token].content
            self._encoder = PromptEncoder(vocabulary)
            processor = ImageProcessor(self.folder, vision)
            self._encoder.serve_images(ImagePlacer(processor, placeholder), "")
        return engine

    def encode(self, chat: Chat) -> EncodedPrompt:
        assert self._encoder is not None, "an engine tells about the tower"
        return self._encoder.encode(ChatPrompt(chat), LIMITS)

    def reference(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        """transformers' token ids of a chat, and the logits behind it."""
        model = transformers.AutoModelForImageTextToText.from_pretrained(self.folder).eval()
        processor = transformers.AutoProcessor.from_pretrained(self.folder)
        images = [
            transformers.image_utils.load_image(part["data"])
            for message in chat
            for part in message["content"]
            if isinstance(part, dict) and part["type"] == "image"
        ]
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        inputs = processor(
            text=text, images=images or None, return_tensors="pt", add_special_tokens=False
        )
        with torch.inference_mode():
            logits = model(**inputs).logits[0, -1]
        return inputs["input_ids"][0].tolist(), logits.numpy()


@pytest.fixture(scope="module", params=FAMILIES)
def sees(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sees:
    return Sees(request.param, tmp_path_factory.mktemp(request.param))


def before(image: Image.Image, text: str = "What is this?") -> Chat:
    return [user(image, text)]


CHATS: dict[str, Chat] = {
    "one before text": [user(picture(1), "What is in this picture?")],
    "one behind text": [user("Look at this: ", picture(2, 90, 31))],
    "four of different sizes, between text": [
        user("First ", picture(1), " then ", picture(2, 20, 60), picture(3, 64, 64), " or "),
        {"role": "assistant", "content": "A radix tree."},
        user("And this?", picture(4, 300, 20)),
    ],
}


@pytest.mark.parametrize("name", CHATS)
def test_logits_are_those_of_transformers(sees: Sees, name: str) -> None:
    chat = CHATS[name]
    engine = sees.engine()
    prompt = sees.encode(chat)
    ids, logits = sees.reference(chat)
    assert prompt.token_ids == ids
    (found,) = engine.pool([prompt], EVERY)
    assert np.abs(found - logits).max() < 1e-4
