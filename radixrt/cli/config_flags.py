"""Makes the command-line flags and docs/server.md from the settings."""

import argparse
from collections.abc import Iterator
from typing import Any

from radixrt.base.config import SETTINGS, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.settings.setting import SECTIONS, Setting
from radixrt.base.settings.translation import add_peer_flags, peer_settings, translated
from radixrt.cli.settings_file import read_settings

_CONFIG_HELP = "YAML or JSON file of settings, under the names of these flags without their dashes; flags win over it"


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
    from_file = {} if file is None else translated(read_settings(file), SETTINGS)
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

`python -m radixrt.launch_server` is the same, and [`radixrt run`](command_line.md) and `radixrt launch` take the same flags. `LLM(path, page_size=1)` takes them as
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
