"""Tiny random checkpoints that see images, saved by transformers with processor and tokenizer; and
images for them."""

import base64
import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from radixrt.messages.images import VisionInfo
from tests.checkpoints import END_OF_TURN, GEMMA4, make_tokenizer

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
    "gemma4": ["<|image|>", "<|image>", "<image|>"],
    "gemma4_e": ["<|image|>", "<|image>", "<image|>"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "qwen2_vl": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "qwen2_5_vl": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "qwen3_5": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "qwen3_vl_moe": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "qwen3_vl": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
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

OTHER_TEXTS = ["gemma4_e", "qwen3_vl_moe", "qwen2_vl"]
"""Those that differ from another one in their language model alone, or in details of the tower."""

FAMILIES = [family for family in SPECIAL if family not in OTHER_TEXTS]
"""Those that all tests are for."""

QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
OWN_SIZES = ("mistral3", "gemma4", "gemma4_e", *QWEN)
"""Those whose images have sizes of their own."""

MARKS = {
    "gemma3": "<start_of_image>",
    **dict.fromkeys(QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
}
"""What templates write for an image, where it is not the placeholder."""

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


_QWEN_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 7,
    "out_hidden_size": 64,
}


def _qwen_config(family: str, image_token: int) -> Any:
    import transformers

    sections = [2, 3, 3] if family.startswith("qwen2") else [4, 2, 2]
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": sections}
    tokens: dict[str, Any] = {
        "image_token_id": image_token,
        "vision_start_token_id": image_token + 1,
        "vision_end_token_id": image_token + 2,
        "video_token_id": image_token + 3,
    }
    if family == "qwen2_5_vl":
        return transformers.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": rope},
            vision_config={**_QWEN_TOWER, "window_size": 28, "fullatt_block_indexes": [1]},
            **tokens,
        )
    if family == "qwen2_vl":
        tower = {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        del tower["intermediate_size"], tower["out_hidden_size"]
        return transformers.Qwen2VLConfig(
            text_config={**_TEXT, "rope_parameters": rope}, vision_config=tower, **tokens
        )
    if family == "qwen3_5":
        from tests.checkpoints.hybrid_configs import DELTA_NET

        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        return transformers.Qwen3_5Config(
            text_config={**_TEXT, **DELTA_NET, "head_dim": 16, "rope_parameters": rope},
            vision_config={**_QWEN_TOWER, "num_position_embeddings": 16},
            **tokens,
        )
    text = {**_TEXT, "num_hidden_layers": 3, "head_dim": 16, "rope_parameters": rope}
    make: Any = transformers.Qwen3VLConfig
    if family == "qwen3_vl_moe":
        make = transformers.Qwen3VLMoeConfig
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    return make(
        text_config=text,
        vision_config={
            **_QWEN_TOWER,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
        },
        **tokens,
    )


def _gemma4_config(family: str, image_token: int) -> Any:
    import transformers

    text = {**_TEXT, **GEMMA4, "sliding_window": 40}
    if family == "gemma4_e":
        text |= {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        }
    else:
        text |= {"use_bidirectional_attention": "vision", "attention_k_eq_v": True}
    return transformers.Gemma4Config(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 256,
            "use_clipped_linears": family == "gemma4_e",
            "standardize": family == "gemma4",
        },
        image_token_id=image_token,
        boi_token_id=image_token + 1,
        eoi_token_id=image_token + 2,
        tie_word_embeddings=True,
    )


def _config(family: str, image_token: int) -> Any:
    import transformers

    if family.startswith("qwen"):
        return _qwen_config(family, image_token)
    if family.startswith("gemma4"):
        return _gemma4_config(family, image_token)
    if family == "mistral3":
        rope = {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 64,
        }
        return transformers.Mistral3Config(
            text_config={**_TEXT, "model_type": "ministral3", "rope_parameters": rope},
            vision_config={**_TOWER, "model_type": "pixtral", "head_dim": 8, "image_size": 70},
            image_token_index=image_token,
            tie_word_embeddings=False,
        )
    if family == "gemma3":
        return transformers.Gemma3Config(
            text_config={**_TEXT, **_GEMMA3_TEXT},
            vision_config=_TOWER,
            mm_tokens_per_image=16,
            image_token_index=image_token,
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
        image_token_index=image_token,
        vision_feature_select_strategy="full" if kind == "siglip" else "default",
        vision_feature_layer=-1 if kind == "siglip" else -2,
    )


def _processor(family: str, tokenizer: Any) -> Any:
    import transformers
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    if family in OWN_SIZES:
        return OwnSizes(family, tokenizer)
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
    square = {"height": TILE, "width": TILE}
    pictures: Any = LlavaImageProcessorPil(size={"shortest_edge": TILE}, crop_size=square)
    if family == "llava_siglip":
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        pictures = SiglipImageProcessorPil(size=square)
    return transformers.LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=7,
        vision_feature_select_strategy="full" if family == "llava_siglip" else "default",
        num_additional_image_tokens=0 if family == "llava_siglip" else 1,
    )


class OwnSizes:
    """What transformers' processors of images of any size do, which want torchvision: its image
    processor, and a text with the placeholders of each image."""

    def __init__(self, family: str, tokenizer: Any) -> None:
        self.family, self.tokenizer = family, tokenizer
        self.apply_chat_template = functools.partial(tokenizer.apply_chat_template, tokenize=False)
        if family == "mistral3":
            from transformers.models.pixtral.image_processing_pil_pixtral import (
                PixtralImageProcessorPil,
            )

            self.pictures: Any = PixtralImageProcessorPil(size={"longest_edge": 70}, patch_size=7)
            return
        if family.startswith("gemma4"):
            from transformers.models.gemma4.image_processing_pil_gemma4 import (
                Gemma4ImageProcessorPil,
            )

            self.pictures = Gemma4ImageProcessorPil(
                patch_size=4, pooling_kernel_size=2, max_soft_tokens=70
            )
            return
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.pictures = Qwen2VLImageProcessorPil(
            patch_size=7, size={"shortest_edge": 14 * 14 * 16, "longest_edge": 14 * 14 * 64}
        )

    def save_pretrained(self, folder: Path) -> None:
        self.pictures.save_pretrained(folder)

    def __call__(self, text: str, images: Any, **settings: Any) -> dict[str, Any]:
        token = SPECIAL[self.family][0]
        found: dict[str, Any] = {}
        if images:
            options = {"patch_size": 14} if self.family == "mistral3" else {}
            found = dict(self.pictures(images, return_tensors="pt", **options))
            first, *others = text.split(token)
            pairs = zip(self._texts(found, token), others, strict=True)
            text = first + "".join(image + other for image, other in pairs)
        found |= self.tokenizer(text, **settings)
        image_token = self.tokenizer.convert_tokens_to_ids(token)
        if self.family != "mistral3":
            found["mm_token_type_ids"] = (found["input_ids"] == image_token).int()
        return found

    def _texts(self, found: dict[str, Any], token: str) -> list[str]:
        if self.family == "mistral3":  # processing_pixtral.py
            sizes = (found["image_sizes"] // 14).tolist()
            rows = (([token] * width + ["[IMG_BREAK]"]) * height for height, width in sizes)
            return ["".join([*one[:-1], "[IMG_END]"]) for one in rows]
        if self.family.startswith("gemma4"):  # processing_gemma4.py
            counts = found.pop("num_soft_tokens_per_image")
            return [f"<|image>{token * int(count)}<image|>" for count in counts]
        return [token * count for count in (found["image_grid_thw"].prod(1) // 4).tolist()]


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
    mark = MARKS.get(family, SPECIAL[family][0])
    tokenizer.chat_template = TEMPLATE.replace("MARK", mark)
    image_token = tokenizer.convert_tokens_to_ids(SPECIAL[family][0])
    config = _config(family, image_token)
    torch.manual_seed(4)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ("vision" in name or "visual" in name) and weight.ndim > 1:
                weight.normal_(std=0.3 * weight[0].numel() ** -0.5 * 3)
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.2)
            if name.endswith("projection_weight"):  # it begins as zeros
                weight.normal_()
            if family.startswith("gemma4") and name.endswith("q_norm.weight"):
                weight.mul_(0.2)  # its scores have no factor
            if name.endswith(LAST):
                weight.mul_(matter)
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):
                buffer.fill_(2.0 if name.endswith("_max") else -2.0)
            if name.endswith(("std_bias", "std_scale", "layer_scalar")):
                buffer.copy_(1.0 + 0.2 * torch.randn_like(buffer))
        if family.startswith("gemma"):  # whose embeddings are tied, or it repeats its last token
            model.get_input_embeddings().weight.mul_(0.2)
    model.save_pretrained(folder)
    _processor(family, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PIXELS = VisionInfo(
    family="llava", weights=b"", tokens_per_tile=4, tile_size=28, image_token=7, feature_bytes=8
)
"""A tower for the images of :func:`make_pixel_processor`."""


def make_pixel_processor(folder: Path) -> Path:
    """Save a processor that leaves pixels as they are."""
    steps = ("resize", "center_crop", "rescale", "normalize")
    settings = {"image_processor_type": "CLIPImageProcessor"} | {f"do_{step}": False for step in steps}  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


LAST = (
    "linear_2.weight",
    "modality_projection.proj.weight",
    "merger.mlp.2.weight",
    "merger.linear_fc2.weight",
    "embedding_projection.weight",
)
"""The matrices whose products are the features."""


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
