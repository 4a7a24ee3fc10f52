"""Checks a GGUF file, and writes what its header holds as the files of a checkpoint folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.base.errors import ConfigError
from radixrt.models.gguf.config import generation_config, pooling_files, transformers_config
from radixrt.models.gguf.file import GGUFFile, read_header
from radixrt.models.gguf.form import PLAIN_KINDS, TABLE, import_gguf
from radixrt.models.gguf.tokenizer import write_tokenizer


def check_file(path: Path) -> tuple[GGUFFile, dict[str, Any]]:
    """The header of a GGUF file and the content of config.json.

    Raises:
        ConfigError: the package ``gguf`` is missing, the file cannot be read or cannot be served.
            The tokenizer is not looked at.
    """
    import_gguf(path)
    file = read_header(path)
    _check_kinds(file)

    def factors(name: str) -> list[float]:
        entry = file.tensors[name]
        values = np.fromfile(entry.file, np.float32, entry.shape[-1], offset=entry.offset)
        return [float(str(value)) for value in values]

    return file, transformers_config(file, factors)


def write_folder(file: GGUFFile, config: dict[str, Any], folder: Path) -> None:
    """Write all files of a checkpoint folder but the weights."""
    write_tokenizer(file, folder)
    contents = {
        "config.json": config,
        "generation_config.json": generation_config(file),
        **pooling_files(file),
        TABLE: {
            "files": {str(path): path.stat().st_size for path in file.files},
            "tensors": list(file.tensors.values()),
        },
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def _check_kinds(file: GGUFFile) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kinds = {GGMLQuantizationType(entry.kind) for entry in file.tensors.values()}
    for kind in sorted(kinds):
        if kind in PLAIN_KINDS:
            continue
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(
                f"{file.files[0]} has weights of the kind {kind.name}, which the package gguf cannot dequantize."
            ) from None
