"""Makes the checkpoint folder of a GGUF file: config, tokenizer and chat template, and a table of
its tensors.

Every process reads a folder in the form of the hub, and so a GGUF file needs no other code in them.
The folder lies in the user's cache and is made once: the weights stay in the GGUF file.
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from radixrt.base.errors import ConfigError
from radixrt.base.user_cache import user_cache
from radixrt.models.gguf.form import TABLE, TensorEntry, import_gguf

_FORM = 8
"""Raised whenever the content of the folders changes, so that old ones are not used."""


def checkpoint_folder(path: Path, mmproj: Path | None = None) -> Path:
    """The folder of a GGUF file, in ``$XDG_CACHE_HOME/radixrt/gguf``; made if a file is new or has
    changed.

    Args:
        mmproj: the file of the vision tower; None: one that lies beside it and fits, if there is
            one.

    Raises:
        ConfigError: the package ``gguf`` is missing, the file cannot be read or cannot be served,
            or the folder cannot be written.
    """
    # Not resolved: the hub's cache has the names of split files only in its links.
    path = path.absolute()
    towers = sorted(path.parent.glob("mmproj*.gguf")) if mmproj is None else [mmproj.absolute()]
    stats = [(file, file.stat()) for file in (path, *towers)]
    files = [f"{file} {stat.st_size} {stat.st_mtime_ns}" for file, stat in stats]
    key = f"{_FORM} {mmproj is None} " + "\n".join(files)
    name = Path(hashlib.sha256(key.encode()).hexdigest()[:16], path.stem)
    try:
        return _made(user_cache("gguf") / name, path, towers, is_found=mmproj is None)
    except OSError as error:
        raise ConfigError(
            f"The config and the tokenizer of {path} cannot be written to the user's cache ({error}); set the environment "
            "variable XDG_CACHE_HOME to a folder that can be written."
        ) from error


def _made(folder: Path, path: Path, towers: list[Path], *, is_found: bool) -> Path:
    """
    Raises:
        OSError: the folder cannot be written.
        ConfigError: as :func:`checkpoint_folder`.
    """
    if folder.is_dir():
        import_gguf(path)
        return folder
    # numpy and tokenizers: a tenth of a second that only the first start of a file needs
    from radixrt.models.gguf.conversion import check_file, write_folder
    from radixrt.models.gguf.tower import find_tower, read_tower

    file, config = check_file(path)
    tower = find_tower(file, config, towers) if is_found else read_tower(file, config, towers[0])
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        write_folder(file, config, made, tower)
        made.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def why_no_tower(folder: Path) -> str:
    """The reason why a file beside a GGUF file is not its vision tower; "": there is no file."""
    return str(json.loads((folder / TABLE).read_text())["why_no_tower"])


def gguf_tensors(folder: Path) -> list[TensorEntry] | None:
    """The tensors of a folder made by :func:`checkpoint_folder`; None: it is another one.

    Raises:
        ConfigError: the GGUF file is gone or has changed since.
    """
    if not (folder / TABLE).is_file():
        return None
    table: dict[str, Any] = json.loads((folder / TABLE).read_text())
    for path, size in table["files"].items():
        if not Path(path).is_file() or Path(path).stat().st_size != size:
            raise ConfigError(f"{path} is missing, or has changed since the server looked at it.")
    return [
        TensorEntry(name, kind, tuple(shape), path, offset, row_bytes)
        for name, kind, shape, path, offset, row_bytes in table["tensors"]
    ]
