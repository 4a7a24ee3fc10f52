"""Reads the file of ``--config``: settings in YAML or JSON, under the names of the flags."""

import difflib
from pathlib import Path
from typing import Any

from radixrt.base.config import SETTINGS
from radixrt.base.errors import ConfigError
from radixrt.base.settings.renamed import REMOVED, RENAMED
from radixrt.base.settings.setting import flag_of
from radixrt.base.settings.translation import PEER_NAMES


def read_settings(path: str) -> dict[str, Any]:
    """The settings in a file, by their names in :class:`ServerConfig`, or those of other engines.

    A name is written as the flag without its dashes (``model-path``), or with underscores. The
    value of a setting that takes several names may be a list.

    Raises:
        ConfigError: the file cannot be read, or holds a name that is no setting.
    """
    import yaml  # here: few command lines name a file

    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path} must hold names and values, such as `model-path: demo`."
        )
    return {_name_of(key, path): _value_of(value) for key, value in content.items()}


def _name_of(key: Any, path: str) -> str:
    known = [*SETTINGS, *RENAMED, *REMOVED]
    name = str(key).lstrip("-").replace("-", "_")
    if name in known or name in PEER_NAMES:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {flag_of(near[0])[2:]}?" if near else ""
    raise ConfigError(f"--config {path}: {key} is not a setting.{hint}")


def _value_of(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value
