"""Makes the checkpoint folder of a GGUF file: config, tokenizer and chat template, and a table of its tensors.

Every process reads a folder in the form of the hub, and so a GGUF file needs no other code in them. The folder lies in
the user's cache and is made once: the weights stay in the GGUF file.
"""

import hashlib
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.base.errors import ConfigError
from radixrt.base.user_cache import user_cache
from radixrt.models.gguf.config import generation_config, pooling_files, transformers_config
from radixrt.models.gguf.file import PLAIN_KINDS, GGUFFile, TensorEntry, read_header
from radixrt.models.gguf.tokenizer import write_tokenizer

_TABLE = "gguf.json"
_FORM = 5
"""Raised whenever the content of the folders changes, so that old ones are not used."""


def checkpoint_folder(path: Path) -> Path:
    """The folder of a GGUF file, in ``$XDG_CACHE_HOME/radixrt/gguf``; made if the file is new or has changed.

    Raises:
        ConfigError: the package ``gguf`` is missing, the file cannot be read or cannot be served.
    """
    path = (
        path.absolute()
    )  # not resolved: the hub's cache has the names of split files only in its links
    stat = path.stat()
    key = f"{_FORM} {path} {stat.st_size} {stat.st_mtime_ns}"
    folder = user_cache("gguf") / hashlib.sha256(key.encode()).hexdigest()[:16] / path.stem
    if folder.is_dir():
        import_gguf(path)
        return folder
    file, config = check_file(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        _write(file, config, made)
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def check_file(path: Path) -> tuple[GGUFFile, dict[str, Any]]:
    """The header of a GGUF file and the content of config.json.

    Raises:
        ConfigError: as :func:`checkpoint_folder`, but the tokenizer is not looked at.
    """
    import_gguf(path)
    file = read_header(path)
    _check_kinds(file)

    def factors(name: str) -> list[float]:
        entry = file.tensors[name]
        values = np.fromfile(entry.file, np.float32, entry.shape[-1], offset=entry.offset)
        return [float(str(value)) for value in values]

    return file, transformers_config(file, factors)


def import_gguf(name: Path | str) -> None:
    """Check that the package ``gguf`` is there, which GGUF files need.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{name} is a GGUF file, for which the package gguf is needed: pip install gguf."
        )


def _write(file: GGUFFile, config: dict[str, Any], folder: Path) -> None:
    write_tokenizer(file, folder)
    contents = {
        "config.json": config,
        "generation_config.json": generation_config(file),
        **pooling_files(file),
        _TABLE: {
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


def gguf_tensors(folder: Path) -> list[TensorEntry] | None:
    """The tensors of a folder made by :func:`checkpoint_folder`; None: it is another one.

    Raises:
        ConfigError: the GGUF file is gone or has changed since.
    """
    if not (folder / _TABLE).is_file():
        return None
    table: dict[str, Any] = json.loads((folder / _TABLE).read_text())
    for path, size in table["files"].items():
        if not Path(path).is_file() or Path(path).stat().st_size != size:
            raise ConfigError(f"{path} is missing, or has changed since the server looked at it.")
    return [
        TensorEntry(name, kind, tuple(shape), path, offset, row_bytes)
        for name, kind, shape, path, offset, row_bytes in table["tensors"]
    ]
