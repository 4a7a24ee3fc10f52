"""Prints results of benchmarks as tables, and writes them as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from radixrt.base.errors import ConfigError


def console_beside(json_file: str | None) -> Console:
    """For tables; on stderr where stdout (``-``) is for JSON."""
    return Console(stderr=json_file == "-")


def print_rows(console: Console, title: str, rows: Sequence[Any]) -> None:
    """A markdown table of dataclasses of one kind, a column a field."""
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for name in asdict(rows[0]):
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        values = asdict(row).values()
        table.add_row(*(f"{v:,.4g}" if isinstance(v, float) else str(v) for v in values))
    console.print(table)


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
