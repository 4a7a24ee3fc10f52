"""The commands ``radixrt cache info``, ``export`` and ``import``."""

import argparse
import tempfile
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from radixrt.base.config import ServerConfig
from radixrt.base.errors import ConfigError, RequestError
from radixrt.kv.store.directory import replica_folders, root_digest, used_bytes
from radixrt.messages.cache_root import BASE_ROOT
from radixrt.scheduler.disk.bundle import (  # fmt: skip
    Head,
    import_bundle,
    printable,
    read_bundle,
    read_index,
    write_bundle,
)

SHOWN = ("model", "dtype", "quantization", "kv_dtype", "isa", "version")
"""Parts of a fingerprint that people recognise."""
_SPOOL_S = 0.05


def info(arguments: argparse.Namespace) -> int:
    """Show what a cache directory or a bundle holds."""
    path = Path(arguments.path).expanduser()
    if path.is_file():
        head, _, file = read_bundle(path)
        file.close()
        print(_described(head.parts), *map(printable, head.titles), sep="\n  ")
        print(f"  {head.num_pages * head.header.page_size} tokens")
        return 0
    if not path.is_dir():
        raise ConfigError(f"{path}: there is no such directory or bundle.")
    for folder in replica_folders(path):
        try:
            parts = _parts(folder)
            header, index = read_index(folder)
        except (OSError, msgspec.MsgspecError, ConfigError) as error:
            print(f"{folder}: cannot be read: {error}")
            continue
        print(f"{folder}: {_described(parts)}")
        print(f"  {len(index) * header.page_size} tokens, {used_bytes(folder) / 1e9:.3f} GB")
    return 0


def _parts(folder: Path) -> dict[str, str]:
    """The parts of the fingerprint of a replica's folder."""
    return msgspec.json.decode((folder.parent / "model.json").read_bytes(), type=dict[str, str])


def _described(parts: dict[str, str]) -> str:
    known = (f"{name} {parts[name]}" for name in SHOWN if parts.get(name))
    return printable(f"{', '.join(known)}; weights {parts.get('weights', '')[:16]}")


def export(arguments: argparse.Namespace, config: ServerConfig) -> int:
    """Compute the KV of files and write it to a bundle."""
    with tempfile.TemporaryDirectory(prefix="radixrt-export-") as scratch:
        cache = Path(scratch, "cache")
        parts = _compute([Path(name) for name in arguments.prefix], config, cache)
        (folder,) = replica_folders(cache)
        root = root_digest((cache / "secret").read_bytes(), BASE_ROOT.packed())
        titles = [Path(name).name for name in arguments.prefix]
        head: Head = write_bundle(Path(arguments.out), parts, titles, folder, root)
    size = Path(arguments.out).stat().st_size
    tokens = head.num_pages * head.header.page_size
    print(f"{arguments.out}: {tokens} tokens of KV, {size / 1e6:.1f} MB")
    return 0


def _compute(files: list[Path], config: ServerConfig, cache: Path) -> dict[str, str]:
    """Fill a new cache directory with the KV of files; returns the parts of its fingerprint."""
    from radixrt.offline.llm import LLM

    prompts = [_prompt(file) for file in files]
    own = replace(config, cache_dir=str(cache), cache_dir_gb=1e6, max_pinned_fraction=1.0)
    default = ServerConfig()
    changed = {
        setting.name: getattr(own, setting.name)
        for setting in fields(own)
        if setting.name != "model_path" and getattr(own, setting.name) != getattr(default, setting.name)
    }  # fmt: skip
    with LLM(config.model_path, **changed) as llm:
        if llm.info.state_bytes:
            raise ConfigError("A bundle cannot hold the states of recurrent layers yet; --cache-dir keeps them.")  # fmt: skip
        try:
            for prompt in prompts:
                llm.pin(prompt, ttl_s=3600)
        except RequestError as error:
            raise ConfigError(str(error)) from error
        while (stats := llm.cache_stats()).disk_pages < stats.pages.cached:
            if stats.disk_stopped:
                raise ConfigError(f"There is no room for the KV in {cache.parent}; set TMPDIR.")
            time.sleep(_SPOOL_S)
    (folder,) = replica_folders(cache)
    return _parts(folder)


def _prompt(file: Path) -> Any:
    """The prompt in a file: messages of a chat if it ends with .json, else a text."""
    try:
        text = file.read_text()
        return msgspec.json.decode(text) if file.suffix == ".json" else text
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prefix {file} cannot be read: {error}.") from error


def import_(arguments: argparse.Namespace) -> int:
    """Add a bundle to a cache directory."""
    from radixrt.worker.fingerprint import machine_cpu, machine_parts

    path, directory = Path(arguments.bundle), Path(arguments.cache_dir).expanduser()
    here = machine_parts() | {"cpu": machine_cpu()}
    added = import_bundle(path, directory, arguments.cache_dir_gb, here)
    print(f"{added} pages of KV added to {directory}")
    return 0
