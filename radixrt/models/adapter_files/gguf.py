"""Reads LoRA adapters in GGUF files, as llama.cpp's ``convert_lora_to_gguf.py`` writes them."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixrt.base.errors import ConfigError
from radixrt.layers.lora import LowRank
from radixrt.models.adapter_files.form import AdapterError, AdapterFile, digest_of, invocation_of
from radixrt.models.gguf.config import is_of_type
from radixrt.models.gguf.file import read_header
from radixrt.models.gguf.form import import_gguf
from radixrt.models.gguf.weights import as_in_transformers, name_in_transformers, read_tensor

_NAME = re.compile(r"(.+)\.lora_([ab])")


def read_file(path: Path, config: dict[str, Any]) -> AdapterFile:
    """Read an adapter. The digest is of the tensors in memory, so that it is of what is computed
    with. They are read from a copy: a file that is cut while it is mapped ends the process.

    Args:
        config: of the model for which it is: model type and numbers of heads.

    Raises:
        AdapterError: it is broken, is no adapter, or is for another architecture.
    """
    try:
        import_gguf(path)
        with path.open("rb") as given, tempfile.NamedTemporaryFile(suffix=".gguf") as copy:
            shutil.copyfileobj(given, copy)
            copy.flush()
            file = read_header(Path(copy.name))
            tensors = {
                entry.name: read_tensor(entry, torch.float32).clone()
                for entry in file.tensors.values()
            }
    except (ConfigError, OSError, ValueError) as error:
        raise AdapterError(f"it cannot be read: {error}") from error
    meta = file.metadata
    if (kind := meta.get("general.type")) != "adapter":
        raise AdapterError(f"it is no adapter: its general.type is {kind}")
    if (kind := meta.get("adapter.type")) != "lora":
        raise AdapterError(f"its adapter.type is {kind}; lora is served")
    architecture = meta.get("general.architecture", "")
    if not is_of_type(architecture, config["model_type"]):
        raise AdapterError(f"it is for {architecture}, and the model is {config['model_type']}")
    alpha = float(meta.get("adapter.lora.alpha", 0.0))
    invocation = invocation_of(meta.get("adapter.alora.invocation_tokens"))
    modules = list(_modules(tensors, alpha, config))
    return AdapterFile(digest_of([invocation, alpha], tensors), modules, invocation)


def _modules(
    tensors: dict[str, Tensor], alpha: float, config: dict[str, Any]
) -> Iterator[dict[str, LowRank]]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        if (found := _NAME.fullmatch(name)) is None:
            raise AdapterError(f"the tensor {name} is no part of a linear layer's LoRA")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise AdapterError("it has no tensors")
    for name, pair in pairs.items():
        if len(pair) < 2:
            raise AdapterError(f"{name} lacks one of the matrices lora_a and lora_b")
        down, up = pair["a"].float(), as_in_transformers(pair["b"].float(), name, config)
        rank = down.shape[-2]
        if down.dim() != up.dim() or rank != up.shape[-1]:
            raise AdapterError(f"the matrices of {name} do not fit one another")
        scaling = alpha / rank if alpha else 1.0
        yield {name_in_transformers(name, config): LowRank(down, up * scaling)}
