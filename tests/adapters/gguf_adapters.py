"""Writes adapters of peft as GGUF files, in the names and layouts of llama.cpp's converter."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file

from tests.models.gguf_files import _ARCHITECTURES, _layout

PREFIX, A = "base_model.model.", ".lora_A.weight"


def write_adapter(
    checkpoint: Path, adapter: Path, path: Path, kind: str = "adapter", **metadata: Any
) -> Path:
    """Write the adapter of a folder, whose scalings have one alpha, for the model of a checkpoint."""
    config = json.loads((checkpoint / "config.json").read_text())
    settings = json.loads((adapter / "adapter_config.json").read_text())
    architecture = _ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(kind)
    writer.add_string("adapter.type", metadata.pop("adapter_type", "lora"))
    writer.add_float32("adapter.lora.alpha", float(settings["lora_alpha"]))
    if tokens := settings.get("alora_invocation_tokens"):
        writer.add_array("adapter.alora.invocation_tokens", tokens)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, down, up in _pairs(load_file(adapter / "adapter_model.safetensors")):
        theirs = names.get_name(f"{name}.weight", try_suffixes=(".weight",))
        assert theirs, name
        rows = _layout(config, f"{name}.weight", up)
        writer.add_tensor(f"{theirs}.lora_a", down.contiguous().numpy())
        writer.add_tensor(f"{theirs}.lora_b", rows.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _pairs(
    tensors: dict[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, down and up of each weight; those of experts are stacked, and peft's gate and up are
    apart."""
    for name in tensors:
        if not name.endswith(A):
            continue
        down, up = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        module = name.removeprefix(PREFIX).removesuffix(A)
        if ".experts" not in module:
            yield module, down, up
            continue
        is_wide = module.endswith(".base_layer")
        experts = module.removesuffix(".base_layer")
        rank = 4 if is_wide else 2
        down = down.unflatten(0, (-1, rank))
        up = up.unflatten(1, (rank, -1)).permute(2, 0, 1)
        parts = zip(("gate_proj", "up_proj"), up.chunk(2, dim=1), strict=True)
        for part, rows in parts if is_wide else (("down_proj", up),):
            yield f"{experts}.{part}", down, rows
