"""Reads the tensors of a vision tower in a GGUF file under their names in a transformers
checkpoint."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from radixrt.models.gguf.form import TensorEntry
from radixrt.models.gguf.weights import read_tensor, unpermuted

_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"}
_SIGLIP_LAYER = {
    **_ATTENTION,
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_SIGLIP = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}
_QWEN_LAYER = {"attn_qkv": "attn.qkv", "attn_q": "attn.qkv", "attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"}  # fmt: skip
_GATED = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_QWEN2_LAYER = {**_QWEN_LAYER, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_QWEN2 = {
    "v.patch_embd": "patch_embed.proj",
    "v.post_ln": "merger.ln_q",
    "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}
_QWEN3_LAYER = {**_QWEN_LAYER, "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"}
_QWEN3 = {
    "v.patch_embd": "patch_embed.proj",
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
_PIXTRAL_LAYER = {
    **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
    "attn_out": "attention.o_proj",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    **{name: f"feed_forward.{part.removeprefix('mlp.')}" for name, part in _GATED.items()},
}
_GEMMA4_LAYER = {
    **_ATTENTION,
    "attn_out": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_post_norm": "post_attention_layernorm",
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    **_GATED,
}
_GEMMA4 = {
    "v.patch_embd": "patch_embedder.input_proj",
    "v.position_embd.weight": "patch_embedder.position_embedding_table",
    "v.std_bias": "std_bias",
    "v.std_scale": "std_scale",
}
_CLIP = {**_SIGLIP, "v.class_embd": "embeddings.class_embedding", "v.pre_ln": "pre_layrnorm"}

_TOWERS: dict[str, tuple[str, str, dict[str, str], dict[str, str]]] = {
    "gemma3": ("vision_tower.vision_model.", "encoder.layers.", _SIGLIP_LAYER, _SIGLIP),
    "gemma4": ("vision_tower.", "encoder.layers.", _GEMMA4_LAYER, _GEMMA4),
    "llava": ("vision_tower.vision_model.", "encoder.layers.", _SIGLIP_LAYER, _CLIP),
    "smolvlm": ("model.vision_model.", "encoder.layers.", _SIGLIP_LAYER, _SIGLIP),
    "mistral3": (
        "vision_tower.",
        "transformer.layers.",
        _PIXTRAL_LAYER,
        {"v.patch_embd": "patch_conv", "v.pre_ln": "ln_pre"},
    ),
    "qwen2_vl": ("visual.", "blocks.", _QWEN2_LAYER, _QWEN2),
    "qwen2_5_vl": ("visual.", "blocks.", {**_QWEN_LAYER, **_GATED}, _QWEN2),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ("visual.", "blocks.", _QWEN3_LAYER, _QWEN3),
    ),
}
"""By transformers' model type: the prefix of the tower's tensors, that of layers behind it, and the
names of their parts and of other tensors, with or without their ends."""
_PROJECTORS = {
    "gemma3": {
        "mm.input_projection.weight": "mm_input_projection_weight",
        "mm.soft_emb_norm.weight": "mm_soft_emb_norm.weight",
    },
    "mistral3": {
        "mm.input_norm.weight": "norm.weight",
        "mm.patch_merger.weight": "patch_merger.merging_layer.weight",
        **{f"mm.{i}.{end}": f"linear_{i}.{end}" for i in (1, 2) for end in ("weight", "bias")},
    },
    "gemma4": {"mm.input_projection.weight": "embedding_projection.weight"},
    "llava": {
        f"mm.{2 * i - 2}.{end}": f"linear_{i}.{end}" for i in (1, 2) for end in ("weight", "bias")
    },
    "smolvlm": {"mm.model.fc.weight": "modality_projection.proj.weight"},
}
"""Those of a projector outside the tower."""
_PREFIXES = {"gemma4": "embed_vision.", "smolvlm": "model.connector."}
_PARTS = (".attn_k.", ".attn_v.", "patch_embd.weight.1")
"""In the names of tensors that are joined to another one in Qwen's checkpoints."""
_LAYER = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias|(?:in|out)put_(?:min|max))")
_DEEP = re.compile(r"v\.deepstack\.(\d+)\.(norm|fc1|fc2)\.(weight|bias)")
_NOT_READ = ("v.token_embd.", "a.", "mm.a.")
"""A copy of an embedding of the language model, and towers of sound."""


def read_tower(
    entries: Sequence[TensorEntry], config: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tower one at a time, under their names in a transformers checkpoint.

    Args:
        config: the checkpoint's.
        dtype: of dequantized matrices; other tensors keep theirs.
    """
    if entries:
        yield from _Tensors(entries, config, dtype).read()


class _Tensors:
    """The tensors of a file, joined and named as in a transformers checkpoint."""

    def __init__(
        self, entries: Sequence[TensorEntry], config: dict[str, Any], dtype: torch.dtype
    ) -> None:
        self._entries = {entry.name: entry for entry in entries}
        self._dtype = dtype
        self._kind: str = config["model_type"]
        self._is_qwen = self._kind.startswith("qwen")
        vision = config["vision_config"]
        self._heads = vision.get("num_attention_heads", 0)
        self._deep = vision.get("deepstack_visual_indexes", [])
        down = self._entries.get("v.blk.0.ffn_down.weight")
        size = vision.get("embed_dim") or vision["hidden_size"]
        self._is_swapped = down is not None and down.shape[-1] == size != down.shape[0]
        """Older files have the two projections of an MLP under each other's names."""

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._entries:
            is_part = self._is_qwen and any(part in name for part in _PARTS)
            if not (is_part or name.startswith(_NOT_READ)):
                yield self._name(name), self._tensor(name)

    def _name(self, name: str) -> str:
        prefix, layers, parts, others = _TOWERS[self._kind]
        projector = _PROJECTORS.get(self._kind, {})
        if name in projector:
            return _PREFIXES.get(self._kind, "multi_modal_projector.") + projector[name]
        if found := _DEEP.fullmatch(name):
            part = {"fc1": "linear_fc1", "fc2": "linear_fc2"}.get(found[2], found[2])
            index = self._deep.index(int(found[1]))
            return f"{prefix}deepstack_merger_list.{index}.{part}.{found[3]}"
        if found := _LAYER.fullmatch(name):
            part = found[2]
            if self._is_swapped:
                part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
            part, end = parts.get(part, part), found[3]
            if self._kind == "gemma4" and part.endswith("_proj") and end == "weight":
                end = "linear.weight"
            return f"{prefix}{layers}{found[1]}.{part}.{end}"
        stem, _, end = name.rpartition(".")
        return prefix + (others.get(name) or f"{others.get(stem, stem)}.{end}")

    def _tensor(self, name: str) -> Tensor:
        tensor = self._read(name)
        if name == "mm.soft_emb_norm.weight":
            return tensor.float() - 1
        if self._is_qwen and name == "v.patch_embd.weight":  # a kernel for each of two times
            return torch.stack([tensor, self._read(name + ".1")], dim=2)
        if self._is_qwen and ".attn_q." in name:
            others = (name.replace("attn_q", f"attn_{part}") for part in "kv")
            return torch.cat([tensor, *map(self._read, others)])
        if self._kind == "gemma4" and name == "v.patch_embd.weight":  # channels last
            return tensor.permute(0, 2, 3, 1).flatten(1)
        if name.endswith(("put_min", "put_max")):
            return tensor.view(())
        if self._kind == "mistral3" and (".attn_q." in name or ".attn_k." in name):
            return unpermuted(tensor, self._heads)
        return tensor

    def _read(self, name: str) -> Tensor:
        return read_tensor(self._entries[name], self._dtype)
