"""Tiny random checkpoints that see images, saved by transformers with processor and tokenizer; and
images for them."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.checkpoints import END_OF_TURN, make_tokenizer

VOCAB_SIZE = 512
TILE = 28
"""Pixels of a side of what the tower sees."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": END_OF_TURN,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": TILE,
    "patch_size": 7,
}

SPECIAL = {
    "llava": ["<image>"],
    "llava_siglip": ["<image>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    "smolvlm": [
        "<image>",
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    ],
}
"""Special tokens of each family; the first is the placeholder."""

FAMILIES = list(SPECIAL)

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_GEMMA3_TEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 12,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}


def _config(family: str, image_token: int) -> Any:
    import transformers

    if family == "gemma3":
        return transformers.Gemma3Config(
            text_config={**_TEXT, **_GEMMA3_TEXT},
            vision_config=_TOWER,
            mm_tokens_per_image=16,
            image_token_id=image_token,
        )
    if family == "smolvlm":
        return transformers.SmolVLMConfig(
            text_config={**_TEXT, "model_type": "llama"},
            vision_config=_TOWER,
            image_token_id=image_token,
            scale_factor=2,
        )
    kind = "siglip" if family == "llava_siglip" else "clip"
    return transformers.LlavaConfig(
        text_config={**_TEXT, "model_type": "qwen2" if kind == "siglip" else "llama"},
        vision_config={**_TOWER, "model_type": f"{kind}_vision_model"},
        image_token_id=image_token,
        vision_feature_select_strategy="full" if kind == "siglip" else "default",
        vision_feature_layer=-1 if kind == "siglip" else -2,
    )


def _processor(family: str, tokenizer: Any) -> Any:
    import transformers
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return transformers.Gemma3Processor(
            image_processor=Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE}),
            tokenizer=tokenizer,
            image_seq_length=16,
        )
    if family == "smolvlm":
        from transformers.models.idefics3.image_processing_pil_idefics3 import (
            Idefics3ImageProcessorPil,
        )

        return transformers.Idefics3Processor(
            image_processor=Idefics3ImageProcessorPil(
                size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}
            ),
            tokenizer=tokenizer,
            image_seq_len=4,
        )
    pictures = LlavaImageProcessorPil(
        size={"shortest_edge": TILE}, crop_size={"height": TILE, "width": TILE}
    )
    return transformers.LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="full" if family == "llava_siglip" else "default",
        num_additional_image_tokens=0 if family == "llava_siglip" else 1,
    )


def make_image_checkpoint(family: str, folder: Path, *, matter: float = 3.0) -> Path:
    """Save a seeded random checkpoint in ``folder`` and return it.

    Args:
        matter: factor of the features, so that answers depend on them.
    """
    import torch
    import transformers

    make_tokenizer(folder)
    names: dict[str, Any] = {}
    if family == "gemma3":
        names = dict(zip(("image_token", "boi_token", "eoi_token"), SPECIAL[family], strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder, model_specific_special_tokens=names
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIAL[family]]})
    mark = "<start_of_image>" if family == "gemma3" else SPECIAL[family][0]
    tokenizer.chat_template = TEMPLATE.replace("MARK", mark)
    image_token = tokenizer.convert_tokens_to_ids(SPECIAL[family][0])
    config = _config(family, image_token)
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "vision" in name and weight.ndim > 1:
                weight.normal_(std=0.3 * weight[0].numel() ** -0.5 * 3)
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            if name.endswith("projection_weight"):  # it begins as zeros
                weight.normal_()
            if name.endswith(("linear_2.weight", "modality_projection.proj.weight")):
                weight.mul_(matter)
        if family == "gemma3":  # whose embeddings are tied, or it repeats its last token
            model.get_input_embeddings().weight.mul_(0.2)
    model.save_pretrained(folder)
    _processor(family, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A random image: smooth, so that it survives resizing."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image, form: str = "PNG", **settings: Any) -> str:
    """The file of an image in base64."""
    file = io.BytesIO()
    image.save(file, form, **settings)
    return base64.b64encode(file.getvalue()).decode()


def user(*parts: str | Image.Image) -> dict[str, Any]:
    """A message of texts and images as prompts have it."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image", "data": png(part)}
            for part in parts
        ],
    }
