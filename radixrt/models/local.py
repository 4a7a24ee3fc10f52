"""Finds the models on this machine: in the hub's cache, in the folders of other programs, and in
folders that are named."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from radixrt.base.config import DEMO_MODEL
from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import check_checkpoint, resolve_model_path
from radixrt.models.gguf.conversion import check_file
from radixrt.models.gguf.hub import PREFIX, cached_models, gguf_models


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint on this machine."""

    name: str
    """Hub id, ``hf:`` name, folder or GGUF file, to be given as ``--model-path``."""
    bytes: int
    reason: str | None
    """The reason why it cannot be served; None: it can."""


def demo() -> LocalModel:
    """The model inside the package."""
    folder = resolve_model_path(DEMO_MODEL)
    size = sum(file.stat().st_size for file in folder.iterdir())
    return LocalModel(name=DEMO_MODEL, bytes=size, reason=None)


def local_models(folders: Iterable[Path] = ()) -> Iterator[LocalModel]:
    """The models in the hub's cache, by name, and the GGUF files and the checkpoints in safetensors
    in ``folders`` and their subfolders.

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
        for config in sorted(folder.rglob("config.json")):
            if weights := list(config.parent.glob("*.safetensors")):
                size = sum(file.stat().st_size for file in weights)
                name, reason = str(config.parent), _why_not(config.parent)
                yield LocalModel(name=name, bytes=size, reason=reason)


def other_folders() -> Iterator[Path]:
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
        return str(error).replace(str(path), "it")  # its name is there already
    return None
