"""The models of a server that has several: finds them in folders, names them, and divides the memory
among them."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from radixrt.base.child import ServedModel
from radixrt.base.config import DEMO_MODEL, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.device.machine import available_memory
from radixrt.models.checkpoint import read_config, served_context_length
from radixrt.models.gguf.hub import gguf_models
from radixrt.models.memory_need import engine_bytes, loads_into_memory

log = logging.getLogger(__name__)

OF_ONE = (
    "cache_bundle", "kv_events", "kv_events_replay", "request_log", "join", "replica_listen",
)  # fmt: skip
"""Settings that only one model of a server can have: addresses, files and links."""


def are_several(configs: Sequence[ServerConfig]) -> bool:
    """Whether models are loaded and unloaded while the server runs."""
    is_folder = any(_in_folder(config) for config in configs)
    return len(configs) > 1 or is_folder or configs[0].keep_alive is not None


def served_models(
    configs: Sequence[ServerConfig],
    total_tokens: int | None,
    prepare: Callable[[ServerConfig], ServerConfig],
) -> list[ServedModel]:
    """The models, checked, with the settings of each; the first has those of the server, too.

    Args:
        configs: one for each ``--model-path``.
        total_tokens: size of the KV pools together of those that have none of their own.
        prepare: checks a model before any process starts.

    Raises:
        ConfigError: a model cannot be served, or does not fit the memory that models may have.
    """
    if len(configs) == 1:  # a folder, most likely
        total_tokens = configs[0].max_total_tokens
        configs = [dataclasses.replace(configs[0], max_total_tokens=None)]
    prepared = []
    for config in configs:
        found = _in_folder(config)
        for path in found or [config.model_path]:
            try:
                prepared.append(prepare(dataclasses.replace(config, model_path=path)))
            except ConfigError as error:
                if not found:
                    raise
                log.warning("%s is not served: %s", path, error)
    if not prepared:
        raise ConfigError(
            f"--model-path {configs[0].model_path} holds no model that can be served."
        )
    _check(prepared)
    budget = prepared[0].model_memory_mb
    if budget is None and loads_into_memory(prepared[0].device):
        budget = available_memory() >> 20
    shared = [
        dataclasses.replace(one, model_memory_mb=budget) for one in _divided(prepared, total_tokens)
    ]
    return [served_model(one) for one in shared]


def served_model(config: ServerConfig) -> ServedModel:
    """A model with its need of memory.

    Raises:
        ConfigError: that is more than ``model_memory_mb``.
    """
    budget = config.model_memory_mb
    need_bytes = engine_bytes(config, (budget or 0) << 20)
    if budget is not None and need_bytes > budget << 20:
        raise ConfigError(
            f"{config.model_name} needs {need_bytes / 1e9:.2f} GB of memory, and the loaded models may take "
            f"{(budget << 20) / 1e9:.2f} GB: raise --model-memory-mb, lower --max-total-tokens, or choose a smaller model."
        )
    return ServedModel(config, need_bytes)


def _in_folder(config: ServerConfig) -> list[str]:
    """The models in the folder of ``--model-path``; none: it is itself a model."""
    folder = Path(config.model_path).expanduser()
    if config.model_path == DEMO_MODEL or not folder.is_dir() or (folder / "config.json").is_file():
        return []
    files = [files[0] for files in gguf_models(map(str, folder.glob("*.gguf"))).values()]
    return sorted([*files, *(str(file.parent) for file in folder.glob("*/config.json"))])


def _check(configs: Sequence[ServerConfig]) -> None:
    """Raises ConfigError if two models have a name, or what only one can have."""
    owners: dict[str, str] = {}
    for config in configs:
        for name in config.model_names:
            if name in owners:
                raise ConfigError(
                    f"Two models are called {name}: give each its served-model-name under models: in the file of --config."
                )
            owners[name] = config.model_path
    for setting in OF_ONE if len(configs) > 1 else ():
        values = [getattr(config, setting) for config in configs]
        if any(value is not None for value in values):
            flag = f"--{setting.replace('_', '-')}"
            raise ConfigError(
                f"{flag} is for a server of one model: leave it or the other models out."
            )


def _divided(configs: Sequence[ServerConfig], total_tokens: int | None) -> list[ServerConfig]:
    """The settings with each model's part of the KV pools: of ``total_tokens`` in proportion to its
    context, otherwise an equal part of the memory."""
    contexts = [
        served_context_length(read_config(Path(one.model_path)), one.context_length)
        for one in configs
        if one.max_total_tokens is None
    ]
    divided = []
    for config in configs:
        if config.max_total_tokens is not None:
            divided.append(config)
        elif total_tokens is None:
            fraction = max(0.05, config.mem_fraction_static / len(configs))
            divided.append(dataclasses.replace(config, mem_fraction_static=fraction))
        else:
            own = served_context_length(read_config(Path(config.model_path)), config.context_length)
            tokens = max(config.page_size, total_tokens * own // sum(contexts))
            divided.append(dataclasses.replace(config, max_total_tokens=tokens))
    return divided
