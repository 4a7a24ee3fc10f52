"""Keeps transformers' form of a config.json in the user's cache.

The models read attributes of a transformers config. To import transformers for them takes half a CPU second, a fourth of the start of
a worker with a small model.
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
from radixrt.base.user_cache import user_cache

log = logging.getLogger(__name__)

_FORM = 1
"""Raised whenever the content of the files changes."""
_MOST_FILES = 64
_NOT_READ = {"name_or_path", "torch_dtype", "use_return_dict"}
"""Attributes whose value is not of the config.json, or whose reading logs a warning."""


class _Attributes(msgspec.Struct, frozen=True):
    """The attributes of a transformers config."""

    values: dict[str, Any]
    others: list[str]
    """Names of those whose values are no JSON."""


class KeptConfig:
    """Has the attributes of a transformers config, and none of its methods."""

    def __init__(self, attributes: _Attributes) -> None:
        vars(self).update(attributes.values)
        self._others = frozenset(attributes.others)

    def __getattr__(self, name: str) -> Any:
        """Raises:
        TypeError: the attribute was not kept; ``getattr`` with a default must not hide that.
        """
        if not name.startswith("_") and name in self._others:
            raise TypeError(f"The attribute {name} of a config is not kept.")
        raise AttributeError(name)


def transformers_config(model_dir: Path, trust_remote_code: bool) -> Any:
    """The config of a checkpoint, by transformers or as it was kept.

    Raises:
        ConfigError: config.json is not valid.
    """
    if trust_remote_code:  # code may read any file
        return _load(model_dir, trust_remote_code)
    version = importlib.metadata.version("transformers")
    key = f"{_FORM} {version} ".encode() + (model_dir / "config.json").read_bytes()
    file = user_cache("configs") / f"{hashlib.sha256(key).hexdigest()[:32]}.msgpack"
    try:
        return KeptConfig(msgspec.msgpack.decode(file.read_bytes(), type=_Attributes))
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
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


def _attributes(config: Any) -> _Attributes | None:
    """What to keep of a config; None if its model needs more than attributes: parts of it are configs of their own, or transformers
    computes its rotary frequencies."""
    if config.get_text_config() is not config or getattr(config, "is_heterogeneous", False):
        return None
    values: dict[str, Any] = {}
    others = sorted(_NOT_READ)
    for name in {*dir(config), *config.attribute_map} - _NOT_READ:
        if name.startswith("_"):
            continue
        try:
            value = getattr(config, name)
        except Exception:  # a property may raise any
            others.append(name)
            continue
        if _is_json(value):
            values[name] = value
        elif not callable(value):
            others.append(name)
    if set(_rope_types(values)) - {"default"}:
        return None
    return _Attributes(values, others)


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


def _write(file: Path, attributes: _Attributes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, made = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "wb") as content:
            content.write(msgspec.msgpack.encode(attributes))
        Path(made).replace(file)
        oldest_first = sorted(file.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for each in oldest_first[:-_MOST_FILES]:
            each.unlink(missing_ok=True)
    except OSError as error:
        log.info("The config is not kept for the next start: %s", error)
