"""Reads the tensors of a GGUF file in the names and layouts of a transformers checkpoint."""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixrt.models.gguf.file import PLAIN_KINDS, TensorEntry

_CHUNK = 1 << 22
"""Weights that are dequantized at once: 16 MiB of float32."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"ffn_up": "mlp.gate_up_proj"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
"""Tensors that are part of the config."""


def read_weights(
    entries: list[TensorEntry], config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors one at a time, under their names in a transformers checkpoint. The file is mapped.

    Args:
        config: the content of config.json.
        dtype: of dequantized matrices; other tensors keep theirs.
    """
    family = config["model_type"].removesuffix("_text")
    for entry in entries:
        if entry.name in _NOT_WEIGHTS:
            continue
        tensor = read_tensor(entry, dtype)
        if family == "llama" and ".attn_q." in entry.name:
            tensor = _unpermuted(tensor, config["num_attention_heads"])
        elif family == "llama" and ".attn_k." in entry.name:
            tensor = _unpermuted(tensor, config["num_key_value_heads"])
        elif family.startswith("gemma") and entry.name.endswith("norm.weight"):
            tensor = tensor.float() - 1  # llama.cpp's converter has added it
        yield _name(entry.name, family), tensor


def _name(name: str, family: str) -> str:
    if (found := _LAYER_NAME.fullmatch(name)) is None:
        top, _, end = name.rpartition(".")
        return f"{_TOP.get(top, top)}.{end}"
    special = _GEMMA if family.startswith("gemma") else _PHI3 if family == "phi3" else {}
    part = special.get(found[2]) or _LAYER.get(found[2], found[2])
    return f"model.layers.{found[1]}.{part}.{found[3]}"


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbours, so its converter interleaves the halves of each head of query and key; undo that."""
    pairs = tensor.unflatten(0, (heads, -1, 2))  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def read_tensor(entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """One tensor of ``entry.shape``: float32, float16 and bfloat16 as they are, other kinds dequantized to ``dtype``."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(entry.kind)
    block, size = GGML_QUANT_SIZES[kind]
    row_bytes = entry.shape[-1] // block * size
    rows = math.prod(entry.shape[:-1])
    data = np.memmap(entry.file, np.uint8, "c", entry.offset, (rows, row_bytes))
    if kind in PLAIN_KINDS:
        plain: torch.dtype = getattr(torch, PLAIN_KINDS[kind])
        return torch.from_numpy(data).view(plain).view(entry.shape)
    tensor = torch.empty(rows, entry.shape[-1], dtype=dtype, device="cpu")
    step = max(1, _CHUNK // entry.shape[-1])
    for start in range(0, rows, step):
        part = dequantize(data[start : start + step], kind)
        tensor[start : start + step] = torch.from_numpy(part)
    return tensor.view(entry.shape)
