"""Where the results of benchmarks go: a console for tables, a file for JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from radixrt.base.errors import ConfigError


def console_beside(json_file: str | None) -> Console:
    """For tables; on stderr where stdout (``-``) is for JSON."""
    return Console(stderr=json_file == "-")


def check_folders(*files: str | None) -> None:
    """Check before a measurement that its results can be written; ``-`` and None need no folder.

    Raises:
        ConfigError: the folder of a file does not exist.
    """
    for file in files:
        if file and file != "-" and not Path(file).parent.is_dir():
            raise ConfigError(
                f"{file} cannot be written: the folder {Path(file).parent} is missing."
            )


def write_json(json_file: str | None, content: Any) -> None:
    """Into a file, to stdout for ``-``, or nowhere."""
    text = json.dumps(content, indent=1) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    elif json_file:
        Path(json_file).write_text(text)
