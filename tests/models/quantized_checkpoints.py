"""Quantized checkpoints of random codes, written by loops over the formats' own definitions, and
the plain checkpoint that means the same."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order_map: half-byte i of a word holds output AWQ_ORDER[i] of its eight."""


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is to be written."""

    method: str = "awq"
    bits: int = 4
    group_size: int = 32
    """-1: the whole input."""
    act_order: bool = False
    version: str = "gptq"
    """Of GPTQ: ``gptq`` or ``gptq_v2``."""
    kept: tuple[str, ...] = ()

    def config(self) -> dict[str, Any]:
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            kept = list(self.kept) or None
            return {**common, "version": "gemm", "zero_point": True, "modules_to_not_convert": kept}
        return {
            **common,
            "desc_act": self.act_order,
            "sym": False,
            "checkpoint_format": self.version,
        }


def quantize_checkpoint(plain: Path, folder: Path, layout: Layout) -> tuple[Path, Path]:
    """(the quantized checkpoint, its plain twin), in two folders below ``folder``."""
    quantized, twin = folder / "quantized", folder / "twin"
    for copy in (quantized, twin):
        shutil.copytree(plain, copy)
    tensors = load_file(plain / "model.safetensors")
    packed, meant = dict(tensors), dict(tensors)
    random = np.random.default_rng(0)
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if not layer.endswith(("_proj", ".w1", ".w2", ".w3")) or any(
            part in layer for part in layout.kept
        ):
            continue
        del packed[name]
        parts, weight = random_layer(tuple(tensor.shape), layout, random)
        packed.update({f"{layer}.{part}": torch.from_numpy(a) for part, a in parts.items()})
        meant[name] = torch.from_numpy(weight)
    save_file(packed, quantized / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, twin / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = layout.config()
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized, twin


def random_layer(
    shape: tuple[int, int], layout: Layout, random: np.random.Generator
) -> tuple[dict[str, NDArray], NDArray]:
    """The tensors of one layer of (outputs, inputs), and the float32 weight [outputs, inputs] they
    stand for."""
    outputs, inputs = shape
    size = inputs if layout.group_size == -1 else layout.group_size
    groups = -(-inputs // size)
    codes = random.integers(0, 1 << layout.bits, (inputs, outputs))
    lowest = 1 if layout.version == "gptq" and layout.method == "gptq" else 0
    zeros = random.integers(lowest, 1 << layout.bits, (groups, outputs))
    scales = (random.uniform(0.5, 1.5, (groups, outputs)) / (1 << layout.bits)).astype(np.float16)
    group_of = np.arange(inputs) // size
    if layout.act_order:
        # the merged projections have the same input, and therefore the same order
        group_of = group_of[np.random.default_rng(inputs).permutation(inputs)]
    weight = np.empty((outputs, inputs), dtype=np.float32)
    for i in range(inputs):
        group = group_of[i]
        weight[:, i] = (codes[i] - zeros[group]) * scales[group].astype(np.float32)
    if layout.method == "awq":
        return {
            "qweight": _awq_words(codes),
            "qzeros": _awq_words(zeros),
            "scales": scales,
        }, weight
    stored = zeros - 1 if layout.version == "gptq" else zeros
    return {
        "qweight": _words(codes.T, layout.bits).T.copy(),
        "qzeros": _words(stored, layout.bits),
        "scales": scales,
        "g_idx": group_of.astype(np.int32),
    }, weight


def _awq_words(codes: NDArray) -> NDArray[np.int32]:
    """[n, outputs] -> int32 [n, outputs / 8]"""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place in range(8):
            half = codes[:, 8 * word + AWQ_ORDER[place]].astype(np.uint32)
            words[:, word] |= half << np.uint32(4 * place)
    return words.view(np.int32)


def _words(codes: NDArray, bits: int) -> NDArray[np.int32]:
    """[n, m] -> int32 [n, m * bits / 32], the first code in the lowest bits"""
    count = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // count), dtype=np.uint32)
    for word in range(words.shape[1]):
        for place in range(count):
            code = codes[:, count * word + place].astype(np.uint32)
            words[:, word] |= code << np.uint32(bits * place)
    return words.view(np.int32)
