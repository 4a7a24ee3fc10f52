"""``python -m radixrt.supervisor.pull RUN_DIR NAME``: downloads a model of the hub for a server that
runs, and checks it.

Writes JSON lines to standard output: progress, and at the end the model, or an error.
"""

import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from radixrt.base.child import read_config
from radixrt.base.config import SETTINGS, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.models.checkpoint import resolve_model_path
from radixrt.models.memory_need import loads_into_memory
from radixrt.supervisor.launch import prepare
from radixrt.supervisor.served_models import served_model

_BY_MODEL = {"tool_call_parser", "reasoning_parser"}
"""Further settings that the first model has for itself."""
_NAME = re.compile(r"(?:hf:)?[\w-][\w.-]*/[\w-][\w.-]*(?::\S+)?")


def pull(run_dir: Path, name: str) -> None:
    """Raises ConfigError if there is no such model, or it cannot be served."""
    path = f"hf:{name.removeprefix('hf.co/')}" if name.startswith("hf.co/") else name
    if not _NAME.fullmatch(path):
        raise ConfigError(
            f"{name} is no name of a model on the hub: write USER/NAME, or hf:USER/REPO:Q4_K_M."
        )
    first = read_config(run_dir)
    of_first = {one.name for one in SETTINGS.values() if one.section == "Model"} | _BY_MODEL
    shared = {one: getattr(first, one) for one in SETTINGS if one not in of_first}
    config = ServerConfig(**shared, model_path=path, served_model_name=name)
    resolve_model_path(
        path, "model", check_room=loads_into_memory(config.device), progress=_progress_class()
    )
    _say(msgspec.to_builtins(served_model(prepare(config))))


def _progress_class() -> type:
    """The class of tqdm by which huggingface_hub reports bytes."""
    from huggingface_hub.utils import tqdm

    class Progress(tqdm):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, "disable": False})  # though nobody sees it

        def display(self, *arguments: Any, **named: Any) -> None:
            if self.unit == "B" and self.total:
                _say({"total": int(self.total), "completed": int(self.n)})

    return Progress


def _say(message: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    try:
        pull(Path(sys.argv[1]), sys.argv[2])
    except ConfigError as error:
        _say({"error": str(error)})
