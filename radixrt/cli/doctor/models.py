"""The command ``radixrt models``: the checkpoints and GGUF files on this machine, and which of them
can be served."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.errors import ConfigError, NotCachedError
from radixrt.base.settings.adapters import named_adapters
from radixrt.cli.doctor.machine import Finding
from radixrt.device.machine import available_memory
from radixrt.models.adapters import read_adapter
from radixrt.models.checkpoint import check_checkpoint, resolve_model_path
from radixrt.models.loader import model_without_weights
from radixrt.models.local import demo, local_models, other_folders
from radixrt.models.memory_need import check_fits, engine_need, loads_into_memory

_UNBOUNDED = 10_000
"""Columns."""
_REST = 60
"""Columns beside the names."""


def run(arguments: argparse.Namespace) -> int:
    """Print the local checkpoints; returns the exit status."""
    found = list(local_models([*other_folders(), *arguments.folders]))
    models = [*found, demo()]
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(models)).decode())
        return 0
    console = Console(highlight=False)
    longest = max(len(model.name) for model in models)
    # A program wants each model on one line, and a name has to be whole, to be copied.
    console.width = max(console.width, longest + _REST) if console.is_terminal else _UNBOUNDED
    table = Table("model", "GB", "can be served", box=None)
    table.columns[0].no_wrap = True
    for model in models:
        verdict = (
            Text("yes", "green") if model.reason is None else Text(f"no: {model.reason}", "yellow")
        )
        if model.name == DEMO_MODEL:
            verdict = Text("yes; the built-in demonstration, which answers about facts in its prompt", "green")  # fmt: skip
        table.add_row(Text(model.name), f"{model.bytes / 1e9:.1f}", verdict)
    console.print(table)
    if not found:
        console.print(
            "There is no other model in the hub's cache on this machine, nor in llama.cpp's or LM Studio's. `radixrt run` offers "
            "some; `radixrt run USER/NAME` downloads one; `radixrt models DIR` looks into a folder.",
            soft_wrap=True,
        )
    return 0


def model_finding(name: str) -> Finding:
    """Whether a model can be served, and whether its weights fit the memory; nothing is loaded or
    downloaded."""
    in_memory = loads_into_memory("auto")
    try:
        folder = resolve_model_path(name, "MODEL", download=False, check_room=in_memory)
        check_checkpoint(folder)
        need = engine_need(ServerConfig(model_path=str(folder)))
        if in_memory:
            check_fits(need)
    except NotCachedError as error:
        advice = f"`radixrt run {name}` downloads it."
        return Finding("model", "warning", str(error), advice)
    except ConfigError as error:
        return Finding("model", "error", f"{name}: {error}")
    fact = f"{name} takes {need}, and {available_memory() / 1e9:.1f} GB are available"
    return Finding("model", "ok", fact)


def adapter_findings(model: str, given: list[str]) -> Iterator[Finding]:
    """Whether LoRA adapters can be served with a model; of this, no weights are read.

    Args:
        given: as of ``--lora``.
    """
    try:
        adapters = named_adapters(" ".join(given))
        base = model_without_weights(resolve_model_path(model, "MODEL", download=False))
    except ConfigError as error:
        yield Finding("adapter", "error", str(error))
        return
    for name, path in adapters.items():
        try:
            adapter = read_adapter(Path(path).expanduser(), base)
        except ConfigError as error:
            yield Finding("adapter", "error", f"{name}: {error}")
            continue
        kind = "is activated by tokens" if adapter.invocation else "works on the whole prompt"
        fact = f"{name} changes {len(adapter.projections)} projections of {model} with rank {adapter.rank}, and {kind}"
        needed = f"Serve it with --max-lora-rank {adapter.rank}."
        default = ServerConfig().max_lora_rank
        yield Finding("adapter", "ok", fact, needed if adapter.rank > default else "")
