"""Makes the command-line flags and docs/server.md from the settings."""

import argparse
from collections.abc import Iterator
from typing import Any

from radixrt.base.config import SETTINGS, ServerConfig
from radixrt.base.errors import ConfigError
from radixrt.base.settings.renamed import REMOVED, RENAMED, upgraded
from radixrt.base.settings.setting import SECTIONS, Setting, flag_of
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
    """Declare ``--config``, one flag for each setting, in the sections of the docs, those of the
    last release and those of other engines."""
    parser.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    for section, settings in _by_section():
        group = parser.add_argument_group(section)
        for setting in settings:
            group.add_argument(setting.flag, **_options(setting))
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in RENAMED:
        parser.add_argument(flag_of(name), action="store_true", **hidden)
    for name in REMOVED:
        parser.add_argument(flag_of(name), **hidden)
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
    return options | {"type": setting.type, "metavar": setting.metavar or metavar}


class _Names(list[str]):
    """The names of a setting, for completion in the shell. The config checks values, and knows those
    of other engines."""

    def __contains__(self, value: object) -> bool:
        return True


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The validated config of a parsed command line: flags win over the file of ``--config``.
    ``arguments.model`` becomes the model that is named there; None: none is.

    Raises:
        ConfigError: a setting is unknown or has a wrong value.
    """
    file = getattr(arguments, "config", None)
    names = {*SETTINGS, *RENAMED, *REMOVED}
    given = {
        name: " ".join(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in names
    }
    from_file = {} if file is None else translated(read_settings(file), SETTINGS)
    given = translated(peer_settings(arguments) | given, SETTINGS)
    model = getattr(arguments, "model", None)
    if model is not None and given.setdefault("model_path", model) != model:
        raise ConfigError(f"{model} and {given['model_path']} are two models; leave one out.")
    settings = upgraded(from_file | given)
    arguments.model = settings.get("model_path")
    return ServerConfig(**settings).validate()


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
