"""The command ``radixrt models``: the checkpoints and GGUF files of the hub's local cache, and which of them can be served."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import check_checkpoint
from radixrt.models.gguf.folder import check_file

_UNBOUNDED = 10_000
"""Columns."""


class LocalModel(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint on this machine."""

    name: str
    """Hub id, or path of a GGUF file, to be given as ``--model-path``."""
    bytes: int
    reason: str | None
    """The reason why it cannot be served; None: it can."""


def run(arguments: argparse.Namespace) -> int:
    """Print the local checkpoints; returns the exit status."""
    models = list(local_models())
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(models)).decode())
        return 0
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED  # a program wants each model on one line
    if not models:
        console.print(
            "The hub's cache on this machine holds no model. `radixrt run USER/NAME` downloads one; `radixrt run` needs none.",
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


def local_models() -> Iterator[LocalModel]:
    """The models in the hub's cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        if files := sorted(newest.snapshot_path.rglob("*.gguf")):
            for file in files:
                yield LocalModel(name=str(file), bytes=file.stat().st_size, reason=_why_not(file))
            continue
        yield LocalModel(
            name=repository.repo_id,
            bytes=repository.size_on_disk,
            reason=_why_not(newest.snapshot_path),
        )


def _why_not(path: Path) -> str | None:
    try:
        (check_file if path.suffix == ".gguf" else check_checkpoint)(path)
    except ConfigError as error:
        return str(error)
    return None
