"""Keeps transformers' form of a config.json in the user's cache.

The models read attributes of a transformers config. To import transformers for them takes half a
CPU second, a fourth of the start of a worker with a small model.
"""

import gc
import hashlib
import importlib.metadata
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from radixrt.base.errors import ConfigError
from radixrt.base.user_cache import drop_oldest, sealed, unsealed, user_cache

log = logging.getLogger(__name__)

_FORM = 3
"""Raised whenever the content of the files changes."""
_MAX_FILES = 64
_NOT_READ = frozenset({
    "base_model_pp_plan", "dtype", "extra_config_files", "extra_files", "ignore_keys_at_rope_validation", "name_or_path",
    "per_layer_config", "torch_dtype", "use_return_dict",
})  # fmt: skip
"""Attributes that are not kept, since no model here reads them: they are no JSON, are not of the
config.json, or log a warning."""


class KeptConfig:
    """Has the attributes of a transformers config, and of its methods one."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        """Raises:
        TypeError: the attribute was not kept; ``getattr`` with a default must not hide that.
        """
        if name in _NOT_READ:
            raise TypeError(f"The attribute {name} of a config is not kept.")
        raise AttributeError(name)

    def get_text_config(self) -> "KeptConfig":
        """Itself; others are not kept."""
        return self


def transformers_config(model_dir: Path, trust_remote_code: bool) -> Any:
    """The config of a checkpoint, by transformers or as it was kept.

    Raises:
        ConfigError: config.json is not valid.
    """
    if trust_remote_code:  # code may read any file
        return _load(model_dir, trust_remote_code)
    version = importlib.metadata.version("transformers")
    key = f"{_FORM} {version} ".encode() + (model_dir / "config.json").read_bytes()
    try:
        file = user_cache("configs") / f"{hashlib.sha256(key).hexdigest()[:32]}.msgpack"
    except OSError as error:
        log.info("The config is not kept for the next start: %s", error)
        return _load(model_dir, trust_remote_code)
    try:
        content = unsealed(file.read_bytes())
        return KeptConfig(msgspec.msgpack.decode(content, type=dict[str, Any]))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("Ignored %s, which cannot be read: %s", file, error)
    config = _load(model_dir, trust_remote_code)
    if (attributes := _attributes(config)) is not None:
        _write(file, attributes)
    return config


def _load(model_dir: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    collects = gc.isenabled()
    gc.disable()  # it imports hundreds of modules, see radixrt/worker/__main__.py
    try:
        return AutoConfig.from_pretrained(
            model_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers validates configs with many exception types
        reason = " ".join(str(error).split())
        raise ConfigError(f"{model_dir}/config.json is not a valid config: {reason}") from error
    finally:
        if collects:
            gc.enable()


def _attributes(config: Any) -> dict[str, Any] | None:
    """What to keep of a config; None if its model needs more than attributes: parts of it are
    configs of their own, transformers computes its rotary frequencies, or a value is no JSON."""
    if config.get_text_config() is not config or getattr(config, "is_heterogeneous", False):
        return None
    names = {name for name in {*dir(config), *config.attribute_map} if not name.startswith("_")}
    try:
        values = {name: getattr(config, name) for name in names - _NOT_READ}
    except Exception:  # a property may raise any
        return None
    values = {name: value for name, value in values.items() if not callable(value)}
    if not _is_json(values) or set(_rope_types(values)) - {"default"}:
        return None
    return values


def _is_json(value: Any) -> bool:
    """Whether a value is the same after it was written and read; a tuple would become a list."""
    if isinstance(value, dict):
        return all(type(key) in (str, int) and _is_json(value[key]) for key in value)
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or type(value) in (bool, int, float, str)


def _rope_types(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "rope_type" in value:
            yield value["rope_type"]
        for part in value.values():
            yield from _rope_types(part)


def _write(file: Path, attributes: dict[str, Any]) -> None:
    try:
        content = sealed(msgspec.msgpack.encode(attributes))
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=file.parent)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
            Path(made).replace(file)
        finally:
            Path(made).unlink(missing_ok=True)
        drop_oldest(file.parent, _MAX_FILES)
    except (OSError, OverflowError, ValueError) as error:  # an integer or a string that is too odd
        log.info("The config is not kept for the next start: %s", error)
