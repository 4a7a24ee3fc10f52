"""The command ``radixrt models``: the checkpoints and GGUF files on this machine, and which of them
can be served."""

import argparse
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixrt.base.errors import ConfigError, NotCachedError
from radixrt.cli.doctor.machine import Finding
from radixrt.device.host_memory import available_memory
from radixrt.models.checkpoint import check_checkpoint, resolve_model_path
from radixrt.models.gguf.conversion import check_file
from radixrt.models.gguf.hub import PREFIX, cached_models, gguf_models
from radixrt.models.memory_need import check_fits, loads_into_memory, memory_need

_UNBOUNDED = 10_000
"""Columns."""


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint on this machine."""

    name: str
    """Hub id, ``hf:`` name or path of a GGUF file, to be given as ``--model-path``."""
    bytes: int
    reason: str | None
    """The reason why it cannot be served; None: it can."""


def run(arguments: argparse.Namespace) -> int:
    """Print the local checkpoints; returns the exit status."""
    models = list(local_models([*_other_folders(), *arguments.folders]))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(models)).decode())
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED  # a program wants each model on one line
    if not models:
        console.print(
            "There is no model in the hub's cache on this machine, nor in llama.cpp's or LM Studio's. `radixrt run USER/NAME` downloads "
            "one; `radixrt run` needs none.",
            soft_wrap=True,
        )
        return 0
    table = Table("model", "GB", "can be served", box=None)
    for model in models:
        verdict = (
            Text("yes", "green") if model.reason is None else Text(f"no: {model.reason}", "yellow")
        )
        table.add_row(Text(model.name), f"{model.bytes / 1e9:.1f}", verdict)
    console.print(table)
    return 0


def model_finding(name: str) -> Finding:
    """Whether a model can be served, and whether its weights fit the memory; nothing is loaded or
    downloaded."""
    in_memory = loads_into_memory("auto")
    try:
        folder = resolve_model_path(name, "MODEL", download=False, check_room=in_memory)
        check_checkpoint(folder)
        need = memory_need(folder)
        if in_memory:
            check_fits(need)
    except NotCachedError as error:
        advice = f"`radixrt run {name}` downloads it."
        return Finding(subject="model", level="warning", fact=str(error), advice=advice)
    except ConfigError as error:
        return Finding(subject="model", level="error", fact=f"{name}: {error}")
    fact = f"{name} takes {need.in_memory / 1e9:.1f} GB of memory, and {available_memory() / 1e9:.1f} GB are available"
    return Finding(subject="model", level="ok", fact=fact)


def local_models(folders: Iterable[Path] = ()) -> Iterator[LocalModel]:
    """The models in the hub's cache, by name, and the GGUF files in ``folders`` and their
    subfolders.

    Raises:
        ConfigError: one of ``folders`` does not exist.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        repositories = frozenset()
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        if packed := cached_models(repository.revisions):
            for quantization, files in packed.items():
                yield _gguf_model(f"{PREFIX}{repository.repo_id}:{quantization}", files)
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        yield LocalModel(
            name=repository.repo_id,
            bytes=repository.size_on_disk,
            reason=_why_not(newest.snapshot_path),
        )
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {folder}.")
        for names in gguf_models(map(str, folder.rglob("*.gguf"))).values():
            yield _gguf_model(names[0], [Path(name) for name in names])


def _other_folders() -> Iterator[Path]:
    """Where llama.cpp and LM Studio keep what they download."""
    home, cache = Path.home(), os.environ.get("XDG_CACHE_HOME")
    llama = os.environ.get("LLAMA_CACHE") or Path(cache or home / ".cache", "llama.cpp")
    for folder in (Path(llama), home / ".lmstudio" / "models", home / ".cache/lm-studio/models"):
        if folder.is_dir():
            yield folder


def _gguf_model(name: str, files: list[Path]) -> LocalModel:
    size = sum(file.stat().st_size for file in files if file.is_file())
    return LocalModel(name=name, bytes=size, reason=_why_not(files[0]))


def _why_not(path: Path) -> str | None:
    try:
        (check_file if path.suffix == ".gguf" else check_checkpoint)(path)
    except ConfigError as error:
        return str(error)
    return None
