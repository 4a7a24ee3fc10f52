"""The checkpoint that every engine serves: a Llama of 387 million seeded random weights in bfloat16, 0.77 GB."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.byte_tokenizer import train_tokenizer
from bench.dummy_checkpoint import write_dummy_checkpoint

LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 24, 896, 4864, 14, 2, 64, 32_000
SEED = 0


def make_checkpoint(folder: Path) -> Path:
    """Write it, unless it is there already: config, tokenizer and weights."""
    weights = folder / "model.safetensors"
    if weights.is_file():
        return folder
    write_dummy_checkpoint(
        folder,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=MLP,
        vocab_size=VOCAB,
        tokenizer=train_tokenizer(VOCAB),
    )
    generator = torch.Generator().manual_seed(SEED)
    tensors = {name: _weight(shape, generator) for name, shape in _shapes()}
    unfinished = weights.with_suffix(".part")
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.rename(weights)
    return folder


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", (MLP, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (MLP, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, MLP)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Matrices that keep activations near unit scale; norms are 1."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()


def weight_bytes(folder: Path) -> int:
    """Of the checkpoint's tensors."""
    with (folder / "model.safetensors").open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    return max(info["data_offsets"][1] for name, info in header.items() if name != "__metadata__")
