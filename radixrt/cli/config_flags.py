"""Makes the command-line flags, the file of ``--config`` and docs/server.md from the settings."""

import argparse
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from radixrt.base.config import SETTINGS, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.settings.setting import SECTIONS, Setting, flag_of
from radixrt.base.settings.translation import PEER_NAMES, add_peer_flags, peer_settings, translated

_CONFIG_HELP = "YAML or JSON file of settings, under the names of these flags without their dashes; flags win over it"


OF_SERVER = ("HTTP server", "Replicas", "Several models")
"""Sections whose settings no single model has."""

MAX_LISTED_CHOICES = 8
"""The page lists the choices of a setting up to this number; its help names the page that has
more."""


def _by_section() -> Iterator[tuple[str, list[Setting]]]:
    for section in SECTIONS:
        yield section, [setting for setting in SETTINGS.values() if setting.section == section]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--config``, one flag for each setting, in the sections of the docs, and those of
    other engines."""
    parser.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    for section, settings in _by_section():
        group = parser.add_argument_group(section)
        for setting in settings:
            names = ["--model"] if setting.name == "model_path" else []
            group.add_argument(setting.flag, *names, **_options(setting))
    add_peer_flags(parser, SETTINGS)


def _options(setting: Setting) -> dict[str, Any]:
    text = setting.help.replace("%", "%%")
    if setting.default is not None and setting.default is not False:
        text = f"{text} (default: {setting.default})"
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}
    if setting.type is bool:
        return options | {"action": "store_true"}
    metavar = setting.type.__name__.upper()
    if setting.choices:
        metavar = "{" + ",".join(setting.choices) + "}"
        options["choices"] = _Names(setting.choices)
    if setting.several:
        options["nargs"] = "+"
    if setting.name == "model_path":
        options["action"] = "append"
    return options | {"type": setting.type, "metavar": setting.metavar or metavar}


class _Names(list[str]):
    """The names of a setting, for completion in the shell. The config checks values, and knows those
    of other engines."""

    def __contains__(self, value: object) -> bool:
        return True


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The validated config of a command line that names one model: flags win over the file of
    ``--config``. ``arguments.model`` becomes that model; None: none is named.

    Raises:
        ConfigError: a setting is unknown or has a wrong value.
    """
    settings, models = _given(arguments)
    if len(models) > 1:
        raise ConfigError("This command serves one model; radixrt serve takes several.")
    return ServerConfig(**settings | models[0]).validate()


def configs_from_arguments(arguments: argparse.Namespace) -> tuple[list[ServerConfig], int | None]:
    """The validated config of each model of a command line, and the tokens of the KV pools together
    of those that have none of their own.

    Raises:
        ConfigError: as in :func:`config_from_arguments`.
    """
    settings, models = _given(arguments)
    if len(models) == 1:
        return [ServerConfig(**settings | models[0]).validate()], None
    total, names = settings.get("max_total_tokens"), settings.pop("served_model_name", None)
    if names is not None:
        if len(each := names.split()) != len(models):
            raise ConfigError(
                f"--served-model-name gives {len(each)} names to {len(models)} models; give each one, in their order."
            )
        models = [
            {"served_model_name": name} | model for name, model in zip(each, models, strict=True)
        ]
    whole = ServerConfig(**settings | models[0]).validate()  # for its errors
    settings["max_total_tokens"] = None
    own = [ServerConfig(**settings | model).validate() for model in models]
    return own, whole.max_total_tokens if total is not None else None


def _given(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings of the server, and those of each of its models alone."""
    file = getattr(arguments, "config", None)
    given = {
        name: " ".join(value) if isinstance(value, list) and name != "model_path" else value
        for name, value in vars(arguments).items()
        if name in SETTINGS
    }
    from_file = {} if file is None else translated(_read_settings(file), SETTINGS)
    given = translated(peer_settings(arguments) | given, SETTINGS)
    settings = from_file | given
    models: list[dict[str, Any]] = settings.pop("models", [{}])
    paths = settings.pop("model_path", [])
    paths = [paths] if isinstance(paths, str) else paths
    model = getattr(arguments, "model", None)
    if model is not None:
        if "model_path" in given and paths != [model]:
            raise ConfigError(f"{model} and {' '.join(paths)} are two models; leave one out.")
        paths = [model]
    if paths:
        models = [{"model_path": path} for path in paths]
    arguments.model = models[0].get("model_path")
    return settings, models


def _read_settings(path: str) -> dict[str, Any]:
    """The settings in a file, by their names in :class:`ServerConfig`, or those of other engines.

    A name is written as the flag without its dashes (``model-path``), or with underscores. The
    value of a setting that takes several names may be a list.

    Raises:
        ConfigError: the file cannot be read, or holds a name that is no setting.

    ``models`` is a list of settings of single models, and ``model-path`` may be one of paths.
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
    models = content.pop("models", None)
    settings = {_name_of(key, path): _value_of(value) for key, value in content.items()}
    if isinstance(content.get("model-path", content.get("model_path")), list):
        settings["model_path"] = [*map(str, content.get("model-path") or content["model_path"])]
    if models is not None:
        settings["models"] = _models(models, path)
    return settings


def _models(models: Any, path: str) -> list[dict[str, Any]]:
    if (
        not isinstance(models, list)
        or not all(isinstance(one, dict) for one in models)
        or not models
    ):
        raise ConfigError(
            f"--config {path}: models must be a list of settings, each with a model-path."
        )
    read = [{_name_of(key, path): _value_of(value) for key, value in one.items()} for one in models]
    for name in {name for one in read for name in one}:
        if name in SETTINGS and SETTINGS[name].section in OF_SERVER:
            raise ConfigError(
                f"--config {path}: {flag_of(name)[2:]} is a setting of the server; write it outside of models."
            )
    return read


def _name_of(key: Any, path: str) -> str:
    name = str(key).lstrip("-").replace("-", "_")
    if name in SETTINGS or name in PEER_NAMES:
        return name
    near = difflib.get_close_matches(name, SETTINGS, n=1)
    hint = f" Did you mean {flag_of(near[0])[2:]}?" if near else ""
    raise ConfigError(f"--config {path}: {key} is not a setting.{hint}")


def _value_of(value: Any) -> Any:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value


def markdown_page() -> str:
    """The text of docs/server.md."""
    lines = [_PAGE_HEAD]
    for section, settings in _by_section():
        lines += ["", f"## {section}", "", "| flag | default | meaning |", "|---|---|---|"]
        lines += map(_row, settings)
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    value = setting.metavar or setting.type.__name__.upper()
    if setting.type is bool:
        value = ""
    elif setting.choices:
        few = len(setting.choices) <= MAX_LISTED_CHOICES
        value = "\\|".join(setting.choices) if few else "NAME"
    default = "" if not value or setting.default is None else f"`{setting.default}`"
    return f"| `{setting.flag}` {value} | {default} | {setting.help} |".replace("  ", " ")


_PAGE_HEAD = """# The server's settings

<!-- Written by `make docs` from radixrt/base/config.py; a test holds the two together. -->

    radixrt serve DIR_OR_HUB_ID [flags]

`python -m radixrt.launch_server` is the same, and [`radixrt run`](command_line.md), `radixrt launch` and `radixrt cache export` take the same flags. `LLM(path, page_size=1)` takes them as
keyword arguments, with underscores. The names of [other engines](guides/coming_from.md#flags) are understood, too. `--config server.yaml` reads settings from a YAML or JSON file under the names of the flags without
their dashes; flags win over it:

```yaml
model-path: demo
port: 30000
page-size: 32
served-model-name: [demo, chat]
disable-radix-cache: false
```

The server prints its address when it is ready, and ends cleanly on Ctrl-C or SIGTERM. If it cannot start, it ends with status 1 and one sentence.
[Reliability](reliability.md#faults) describes what happens when a process dies."""

if __name__ == "__main__":
    print(markdown_page(), end="")
