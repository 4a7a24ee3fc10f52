"""Reads the tensors of a GGUF file in the names and layouts of a transformers checkpoint."""

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixrt.layers.matrix import DenseMatrix, MatrixFormat
from radixrt.layers.quantization.blocks import BlockStack, MixedStack, block_matrices
from radixrt.layers.quantization.scheme import BLOCK_KINDS
from radixrt.models.gguf.form import PLAIN_KINDS, TensorEntry
from radixrt.models.loading_progress import LoadingProgress

log = logging.getLogger(__name__)

_CHUNK = 1 << 22
"""Weights that are dequantized at once: 16 MiB of float32."""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
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
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The projections of each expert, by the stack that holds them."""
_GEMMA = {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4 = {
    **_GEMMA,
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_proj",
    "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_CONVOLUTION = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}


def _mamba(block: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "norm": "norm", "out": "out_proj", "a": "A_log"}
    parts |= {"d": "D", "dt.bias": "dt_bias"}
    return {f"ssm_{theirs}": f"{block}.{ours}" for theirs, ours in parts.items()}


_SINGLE_BLOCK = {
    **_mamba("mixer"),
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
_LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
}
_UP = ("attn_kv_b.", "attn_k_b.", "attn_v_b.")
"""The projections of latents to keys and values, which are kept in 16 bits."""
_SPECIAL = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENTS),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTION),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), _DELTA_NET),
    **dict.fromkeys(("granitemoehybrid", "falcon_h1"), _mamba("mamba")),
    **dict.fromkeys(("nemotron_h", "mamba2"), _SINGLE_BLOCK),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "hunyuan_v1_dense": {
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    },
    "minimax_m2": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.w1",
        "ffn_down_exps": "block_sparse_moe.experts.w2",
        "ffn_up_exps": "block_sparse_moe.experts.w3",
        "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias",
    },
}
"""Other names in layers, by family."""
_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
"""Tensors of layers that have another end of their name, too."""
_FUSED = {"experts.gate_up_proj", "experts.down_proj"}
"""Names that end so in transformers."""
_PERMUTED = {"llama", "mistral", "ministral3", "granite", "smollm3", "granitemoehybrid"}
"""Families whose queries and keys llama.cpp's converter stores in the order of its own rotation."""
_OFFSET_NORMS = {"gemma2", "gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""Families that store the weights of their norms minus one, which the converter adds."""
_LAYER_NAME = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias|scale))?")
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
"""Tensors that are part of the config."""


class BlockFormats:
    """The format of each matrix of a model: blocks of the file's kinds if the kernels can multiply
    by them, else plain weights."""

    def __init__(
        self,
        entries: list[TensorEntry],
        config: dict[str, Any],
        translate: Callable[[str, Tensor], Iterator[tuple[str, Tensor]]],
    ) -> None:
        self._matrix = block_matrices()
        self._kinds: dict[str, int] = {}
        self._tensors: dict[str, str] = {}
        """Kind, and name in the file, by the projection's name in the model."""
        self._stacks: set[str] = set()
        """Projections of experts, and all in blocks."""
        self.kept: set[str] = set()
        """Tensors of the file that stay in blocks, of the matrices so far."""
        for entry in entries:
            name = _name(entry.name, _family(config))
            is_plain = any(part in entry.name for part in (".ffn_gate_inp", *_UP))
            is_block = entry.kind in BLOCK_KINDS and not is_plain
            if not is_block and ".experts." not in name:
                continue
            for part, _ in translate(name, torch.empty(entry.shape, device="meta")):
                self._stacks.add(part.removesuffix(".weight"))
                if is_block:
                    self._kinds[part.removesuffix(".weight")] = entry.kind
                    self._tensors[part.removesuffix(".weight")] = entry.name

    def format_of(self, path: str, projections: Sequence[str]) -> MatrixFormat:
        """See ``matrix_formats``. Of projections that are computed together, each has its own."""
        stack, is_stack, last = path.rpartition(".experts.")
        if is_stack:  # one tensor of the file has a projection of all experts
            parts = [f"{stack}.experts.0.{part}" for part in _STACKED[last]]
            names = [name for name in parts if name in self._stacks]
        else:
            names = list(projections) or [path]
        kinds = {name: self._kinds.get(name) for name in names}
        if not any(kind is not None for kind in kinds.values()):
            return DenseMatrix
        self.kept.update(self._tensors[name] for name in names if kinds[name] is not None)
        if not is_stack:
            return partial(self._matrix, kinds=kinds)
        first, *others = kinds.values()
        if first is None or any(kind != first for kind in others):
            return partial(MixedStack, kinds=[first, *others])
        return partial(BlockStack, kind=first)


def read_weights(
    entries: list[TensorEntry],
    config: dict[str, Any],
    dtype: torch.dtype,
    kept: Collection[str] = (),
    progress_level: int = logging.INFO,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors one at a time, under their names in a transformers checkpoint; those of all
    experts are one, whose name has no number. The file is mapped.

    Args:
        dtype: of dequantized matrices; other tensors keep theirs.
        kept: names in the file of tensors that stay in blocks: uint8 [..., rows, bytes of a row].
        progress_level: of the lines of the log that tell the progress.
    """
    family = _family(config)
    files = [Path(file) for file in dict.fromkeys(entry.file for entry in entries)]
    values = {entry.name: entry for entry in entries if ".attn_v_b." in entry.name}
    progress = LoadingProgress(files, progress_level)
    for _, of_file in groupby(entries, key=lambda entry: entry.file):
        for entry in of_file:
            if entry.name not in _NOT_WEIGHTS and entry.name not in values:
                if entry.name in kept:
                    tensor = _map(entry).view(*entry.shape[:-1], entry.row_bytes)
                else:
                    tensor = read_tensor(entry, dtype)
                if ".attn_k_b." in entry.name:  # keys apart from values, and transposed
                    value = read_tensor(values[entry.name.replace("attn_k_b", "attn_v_b")], dtype)
                    tensor = torch.cat([tensor.transpose(1, 2), value], dim=1).flatten(0, 1)
                yield _name(entry.name, family), as_in_transformers(tensor, entry.name, config)
            progress.add_tensor(math.prod(entry.shape[:-1]) * entry.row_bytes)
        progress.add_file()


def name_in_transformers(name: str, config: dict[str, Any]) -> str:
    """The name of a tensor of the file in a transformers checkpoint."""
    return _name(name, _family(config))


def as_in_transformers(tensor: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """Undo the changes that llama.cpp's converter makes to a tensor, or to the output features of
    an adapter of it."""
    family = _family(config)
    if family in _PERMUTED and ".attn_q." in name:
        return unpermuted(tensor, config["num_attention_heads"])
    if family in _PERMUTED and ".attn_k." in name:
        return unpermuted(tensor, config["num_key_value_heads"])
    part = name.rpartition("blk.")[2].partition(".")[2]
    if family in _OFFSET_NORMS and name.endswith("norm.weight") and part != "ssm_norm.weight":
        return tensor.float() - 1
    if part in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        return tensor.unsqueeze(1)
    if part == "ssm_a":
        return (-tensor.float()).log().flatten()
    if part in ("ssm_d", "ssm_norm.weight"):
        return tensor.flatten()
    return tensor.view(1, -1) if part == "ffn_gate_inp_shexp.weight" else tensor


def warn_of_dequantization(
    entries: list[TensorEntry], kept: Collection[str], dtype: torch.dtype
) -> None:
    """Log the memory that quantized weights take whose kind has no packed form."""
    weights = sum(
        math.prod(entry.shape)
        for entry in entries
        if entry.kind not in PLAIN_KINDS
        and entry.name not in kept
        and not any(part in entry.name for part in _UP)
    )
    if weights:
        log.warning(
            "%.0f million quantized weights of this GGUF file are dequantized to %d bits in memory (%.1f GB); "
            "--quantization int8 rounds all weights to 8 bits (docs/gguf.md).",
            weights / 1e6,
            8 * dtype.itemsize,
            weights * dtype.itemsize / 1e9,
        )


def _family(config: dict[str, Any]) -> str:
    return str(config["model_type"]).removesuffix("_text")


def _name(name: str, family: str) -> str:
    if (found := _LAYER_NAME.fullmatch(name)) is None:
        top, _, end = name.rpartition(".")
        return f"{_TOP.get(top, top)}.{end}"
    special, whole = _SPECIAL.get(family, {}), f"{found[2]}.{found[3]}"
    if found[3] is None:  # parameters of heads, and a norm of Falcon-H1
        part = special.get(found[2]) or f"{_LAYER.get(found[2], found[2])}.weight"
        return f"model.layers.{found[1]}.{part}"
    if other := special.get(whole) or _WHOLE.get(whole):
        return f"model.layers.{found[1]}.{other}"
    part = special.get(found[2]) or _LAYER.get(found[2], found[2])
    end = "" if part in _FUSED else f".{found[3]}"
    return f"model.layers.{found[1]}.{part}{end}"


def unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbours, so its converter interleaves the halves of each head of query
    and key; undo that."""
    pairs = tensor.unflatten(0, (heads, -1, 2))  # [heads, head_dim / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)


def read_tensor(entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    """One tensor of ``entry.shape``: float32, float16 and bfloat16 as they are, other kinds
    dequantized to ``dtype``."""
    if entry.kind in PLAIN_KINDS:
        plain: torch.dtype = getattr(torch, PLAIN_KINDS[entry.kind])
        return _map(entry).view(plain).view(entry.shape)
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    data = _map(entry).numpy()
    rows, columns = len(data), entry.shape[-1]
    tensor = torch.empty(rows, columns, dtype=dtype, device="cpu")
    step = max(1, _CHUNK // columns)
    for start in range(0, rows, step):
        part = dequantize(data[start : start + step], GGMLQuantizationType(entry.kind))
        tensor[start : start + step] = torch.from_numpy(part)
    return tensor.view(entry.shape)


def _map(entry: TensorEntry) -> Tensor:
    """The bytes of a tensor in the file, which is mapped: uint8 [rows, bytes of a row]"""
    shape = (math.prod(entry.shape[:-1]), entry.row_bytes)
    return torch.from_numpy(np.memmap(entry.file, np.uint8, "c", entry.offset, shape))
