"""Makes the command-line flags and docs/server.md from the settings."""

import argparse
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any

from radixrt.base.config import ServerConfig
from radixrt.base.settings.renamed import REMOVED, RENAMED, RENAMED_VALUES, upgraded
from radixrt.base.settings.setting import SECTIONS, Kind, flag_of
from radixrt.cli.settings_file import read_settings

_CONFIG_HELP = "YAML or JSON file of settings, under the names of these flags without their dashes; flags win over it"


MAX_LISTED_CHOICES = 8
"""The page lists the choices of a setting up to this number; its help names the page that has more."""


def _by_section() -> Iterator[tuple[str, list[Field]]]:
    for section in SECTIONS:
        yield section, [s for s in fields(ServerConfig) if s.metadata["section"] == section]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--config``, one flag for each setting, in the sections of the docs, and those of the last release."""
    parser.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    for section, settings in _by_section():
        group = parser.add_argument_group(section)
        for setting in settings:
            kind, options = Kind.of(setting), _options(setting)
            if kind.type is bool:
                group.add_argument(flag_of(setting.name), action="store_true", **options)
                continue
            metavar = kind.type.__name__.upper()
            if kind.choices:
                metavar = "{" + ",".join(kind.choices) + "}"
                aliases = setting.metadata.get("aliases", ())
                renamed = RENAMED_VALUES.get(setting.name, ())
                options["choices"] = [*kind.choices, *aliases, *renamed]
            options["metavar"] = setting.metadata.get("metavar", metavar)
            if setting.metadata.get("several"):
                options["nargs"] = "+"
            group.add_argument(flag_of(setting.name), type=kind.type, **options)
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    for name in RENAMED:
        parser.add_argument(flag_of(name), action="store_true", **hidden)
    for name in REMOVED:
        parser.add_argument(flag_of(name), **hidden)


def _options(setting: Field) -> dict[str, Any]:
    default, text = setting.default, setting.metadata["help"].replace("%", "%%")
    if default is not None and default is not False:
        text = f"{text} (default: {default})"
    return {"dest": setting.name, "default": argparse.SUPPRESS, "help": text}


def config_from_arguments(arguments: argparse.Namespace) -> ServerConfig:
    """The validated config of a parsed command line: flags win over the file of ``--config``.

    Raises:
        ConfigError: a setting is unknown or has a wrong value.
    """
    file = getattr(arguments, "config", None)
    names = {*(f.name for f in fields(ServerConfig)), *RENAMED, *REMOVED}
    given = {
        name: " ".join(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in names
    }
    from_file = {} if file is None else read_settings(file)
    return ServerConfig(**upgraded(from_file | given)).validate()


def markdown_page() -> str:
    """The text of docs/server.md."""
    lines = [_PAGE_HEAD]
    for section, settings in _by_section():
        lines += [
            "",
            f"## {section}",
            "",
            "| flag | default | meaning |",
            "|---|---|---|",
        ]
        lines += map(_row, settings)
    return "\n".join(lines) + "\n"


def _row(setting: Field) -> str:
    kind = Kind.of(setting)
    value = setting.metadata.get("metavar", kind.type.__name__.upper())
    if kind.type is bool:
        value = ""
    elif kind.choices:
        value = "\\|".join(kind.choices) if len(kind.choices) <= MAX_LISTED_CHOICES else "NAME"
    default = "" if not value or setting.default is None else f"`{setting.default}`"
    meaning = setting.metadata["help"]
    return f"| `{flag_of(setting.name)}` {value} | {default} | {meaning} |".replace("  ", " ")


_PAGE_HEAD = """# The server's settings

<!-- Written by `make docs` from radixrt/base/config.py; a test holds the two together. -->

    radixrt serve --model-path DIR_OR_HUB_ID [flags]

`python -m radixrt.launch_server` is the same, and [`radixrt run`](command_line.md) takes the same flags. `LLM(path, page_size=1)` takes them as
keyword arguments, with underscores. `--config server.yaml` reads settings from a YAML or JSON file under the names of the flags without
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
