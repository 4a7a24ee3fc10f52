"""Reads the setting that names LoRA adapters."""

import json
import re
from collections.abc import Iterator

from radixrt.base.errors import ConfigError

_FIELDS = {"name", "path", "base_model_name", "lora_name", "lora_path", "pinned"}
"""Fields of vLLM's JSON and of SGLang's. Adapters are pinned in any case, and have one base."""


def named_adapters(setting: str | None) -> dict[str, str]:
    """The folders of adapters by their names.

    >>> named_adapters('sql=/data/sql {"name": "chat", "path": "adapters/chat"} /data/code')
    {'sql': '/data/sql', 'chat': 'adapters/chat', 'code': '/data/code'}

    Raises:
        ConfigError: a name or a path is missing, or a name comes twice.
    """
    found: dict[str, str] = {}
    for name, path in _given(setting or ""):
        if not name or not path:
            raise ConfigError("--lora needs NAME=PATH: the name of an adapter and its folder.")
        if name in found:
            raise ConfigError(f"--lora has the name {name} twice.")
        found[name] = path
    return found


def _given(text: str) -> Iterator[tuple[str, str]]:
    """Names and paths, in any of the forms of the peers."""
    while text := text.lstrip(" ,\n"):
        if text.startswith("{"):
            try:
                fields, end = json.JSONDecoder().raw_decode(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"--lora has JSON that cannot be read: {error}.") from error
            if unknown := fields.keys() - _FIELDS:
                raise ConfigError(f"--lora has an unknown field {min(unknown)} in its JSON.")
            name, path = (fields.get(key) or fields.get(f"lora_{key}") for key in ("name", "path"))
            yield str(name or ""), str(path or "")
        else:
            one = re.split(r"[\s,]", text, maxsplit=1)[0]
            end = len(one)
            name, equals, path = one.partition("=")
            yield (name, path) if equals else (one.rstrip("/").rpartition("/")[2], one)
        text = text[end:]
