"""Makes a checkpoint that answers like the built-in model and costs as much to compute as a model
of 0.4 billion parameters.

    python -m bench.padded_demo DIR

It is a plain Llama checkpoint in bfloat16 (0.81 GB), so that other engines and llama.cpp's
converter read it too. The built-in model's weights lie in the corner of larger matrices of zeros:
zeros read nothing from the further channels, heads and neurons, and write nothing to them. Further
layers have random weights, but zeros in the two projections that add to the hidden state, so they
change nothing.

The mean of squares in an RMSNorm is over all channels, so zeros divide it by hidden_size / 256.
Epsilon is divided by that too, and the norms' weights by its square root. Both are exact for powers
of 4. A head's size, its rotary frequencies and the scale of scores stay as they are.
The built-in model's draft head, if there is one, is enlarged alike.
"""

import argparse
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixrt.base.config import DEMO_MODEL
from radixrt.models.checkpoint import read_config, resolve_model_path
from radixrt.models.head_files import FOLDER

SEED = 0
_WRITE_TO_HIDDEN = ("o_proj", "down_proj")


@dataclass(frozen=True)
class PaddedShape:
    """The larger shape, under transformers' names; by default one of 405 million parameters."""

    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    intermediate_size: int = 4608


def make_padded_demo(folder: Path, shape: PaddedShape = PaddedShape()) -> Path:
    """Write the checkpoint, unless it is there already, and return its folder.

    Raises:
        ValueError: the built-in model does not fit into the shape, or not exactly.
    """
    source = resolve_model_path(DEMO_MODEL)
    weights = folder / "model.safetensors"
    config = read_config(source)
    _check(shape, config)
    folder.mkdir(parents=True, exist_ok=True)
    if (source / FOLDER).is_dir():
        pad_head(source / FOLDER, folder / FOLDER, config, shape)
    if weights.is_file():
        return folder
    for file in source.iterdir():
        if file.name != weights.name and file.is_file():
            shutil.copy(file, folder)
    widened = shape.hidden_size / config["hidden_size"]
    changed = asdict(shape) | {"rms_norm_eps": config["rms_norm_eps"] / widened}
    (folder / "config.json").write_text(json.dumps(config | changed, indent=1))
    padded = dict(_padded(load_file(source / weights.name), config, shape))
    unfinished = weights.with_suffix(".part")
    save_file(padded, unfinished, metadata={"format": "pt"})
    unfinished.rename(weights)
    return folder


def pad_head(source: Path, folder: Path, model: dict[str, Any], shape: PaddedShape) -> None:
    """Write a draft head of the built-in model that costs as much as a layer of the padded one.

    Args:
        model: the config of the built-in model.
    """
    own = read_config(source)
    config = own | {"vocab_size": own["draft_vocab_size"]}
    _check(shape, config)
    first_of = _layers_of(model, shape)
    layers = [first_of[layer] for layer in own["eagle_aux_hidden_state_layer_ids"]]
    widened = shape.hidden_size / config["hidden_size"]
    changed = asdict(shape) | {"num_hidden_layers": 1, "target_hidden_size": shape.hidden_size}
    changed |= {"rms_norm_eps": config["rms_norm_eps"] / widened}
    folder.mkdir(parents=True, exist_ok=True)
    changed["eagle_aux_hidden_state_layer_ids"] = layers
    (folder / "config.json").write_text(json.dumps(own | changed, indent=1))
    side_by_side = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "fc": 3}
    padded = {
        name: _enlarged(name, tensor, config, shape, side_by_side.get(name.split(".")[-2], 1))
        for name, tensor in load_file(source / "model.safetensors").items()
        if "." in name
    }
    padded["d2t"] = load_file(source / "model.safetensors")["d2t"]
    save_file(padded, folder / "model.safetensors", metadata={"format": "pt"})


def _layers_of(config: dict[str, Any], shape: PaddedShape) -> list[int]:
    """The padded model's layer for each of the built-in model's, spread evenly."""
    layers = config["num_hidden_layers"]
    return [layer * shape.num_hidden_layers // layers for layer in range(layers)]


def _check(shape: PaddedShape, config: dict[str, Any]) -> None:
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if any(value < config[name] for name, value in asdict(shape).items()) or heads % kv_heads:
        raise ValueError(f"The built-in model does not fit into {shape}.")
    if heads // kv_heads < config["num_attention_heads"] // config["num_key_value_heads"]:
        raise ValueError("A key-value head of the built-in model has more query heads than that.")
    widened = shape.hidden_size / config["hidden_size"]
    if widened**0.5 not in (1, 2, 4, 8):
        raise ValueError("The hidden size must be 1, 4, 16 or 64 times the built-in model's.")


def _padded(
    tensors: dict[str, Tensor], config: dict[str, Any], shape: PaddedShape
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the padded checkpoint; the built-in model's layers are spread evenly over its
    layers."""
    generator = torch.Generator().manual_seed(SEED)
    sources = {layer: own for own, layer in enumerate(_layers_of(config, shape))}
    for name, tensor in tensors.items():
        if ".layers." not in name:
            yield name, _enlarged(name, tensor, config, shape)
    for layer in range(shape.num_hidden_layers):
        for name, tensor in tensors.items():
            own = f"model.layers.{sources.get(layer, 0)}."
            if not name.startswith(own):
                continue
            larger = _enlarged(name, tensor, config, shape)
            if layer not in sources and larger.ndim > 1:
                wide = larger.shape[-1] ** -0.5
                larger = (torch.randn(larger.shape, generator=generator) * wide).to(larger.dtype)
                if any(part in name for part in _WRITE_TO_HIDDEN):
                    larger.zero_()
            yield name.replace(own, f"model.layers.{layer}."), larger


def _enlarged(
    name: str, tensor: Tensor, config: dict[str, Any], shape: PaddedShape, num_inputs: int = 1
) -> Tensor:
    """A tensor of the built-in model in the corner of one of the larger shape.

    A key-value head keeps its query heads, which are those with neighbouring numbers.

    Args:
        num_inputs: hidden states that it reads side by side.
    """
    larger = asdict(shape)
    if tensor.ndim == 1:
        norm = tensor * (config["hidden_size"] / shape.hidden_size) ** 0.5
        return _corner(norm, (shape.hidden_size,))

    def sizes(of: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows and columns: each a size, or key-value heads, query heads of each, and the size of a
        head."""
        hidden, neurons = (of["hidden_size"],), (of["intermediate_size"],)
        inputs = (num_inputs, *hidden)
        kv_heads, head_dim = of["num_key_value_heads"], config["head_dim"]
        queries = (kv_heads, of["num_attention_heads"] // kv_heads, head_dim)
        rows_and_columns = {
            "q_proj": (queries, inputs),
            "k_proj": ((kv_heads, head_dim), inputs),
            "v_proj": ((kv_heads, head_dim), inputs),
            "fc": (hidden, inputs),
            "o_proj": (hidden, queries),
            "gate_proj": (neurons, hidden),
            "up_proj": (neurons, hidden),
            "down_proj": (hidden, neurons),
        }
        return rows_and_columns.get(name.split(".")[-2], ((config["vocab_size"],), hidden))

    (rows, columns), (more_rows, more_columns) = sizes(config), sizes(larger)
    padded = _corner(tensor.reshape(*rows, *columns), (*more_rows, *more_columns))
    return padded.flatten(0, len(rows) - 1).flatten(1)


def _corner(tensor: Tensor, sizes: tuple[int, ...]) -> Tensor:
    zeros = torch.zeros(sizes, dtype=tensor.dtype)
    zeros[tuple(slice(size) for size in tensor.shape)] = tensor
    return zeros


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.padded_demo",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="made if it is not there")
    print(make_padded_demo(parser.parse_args().folder))


if __name__ == "__main__":
    main()
