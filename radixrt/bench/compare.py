"""Compares two runs of ``radixrt bench serve`` from their JSON files."""

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from radixrt.base.errors import ConfigError

_RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
_LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def compare_runs(before: Path, after: Path, console: Console) -> None:
    """Print the numbers of both runs and their ratios.

    Raises:
        ConfigError: a file is no run.
    """
    documents = _document(before), _document(after)
    first, second = (document["summary"] for document in documents)
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="dim")
    for column in (before.name, after.name, "ratio"):
        table.add_column(column, justify="right")
    for name in _RATES:
        _add(table, name.replace("_per_s", "/s").replace("_", " "), first[name], second[name])
    for name, title in _LATENCIES.items():
        for percentile in ("p50", "p99"):
            values = [(run[name] or {}).get(percentile) for run in (first, second)]
            _add(table, f"{title} {percentile}, ms", *values)
    if first.get("goodput") and second.get("goodput"):
        _add(
            table,
            "goodput, requests/s",
            first["goodput"]["requests_per_s"],
            second["goodput"]["requests_per_s"],
        )
    console.print(table)
    different = _different_settings(*documents)
    if different:
        console.print(f"The runs differ in {', '.join(different)}.", style="yellow")


def _add(table: Table, name: str, before: float | None, after: float | None) -> None:
    if before is None or after is None:
        return
    ratio = f"{after / before:.3f}" if before else "-"
    table.add_row(name, f"{before:,.2f}", f"{after:,.2f}", ratio)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read as a run: {error}.") from error
    if not {"summary", "settings"} <= set(document):
        raise ConfigError(f"{path} is no run: write one with --json FILE.")
    return document


def _different_settings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of the settings of the load in which two runs differ."""
    of_output = {"json", "plot", "compare", "url", "base_url"}
    first, second = before["settings"], after["settings"]
    names = (set(first) | set(second)) - of_output
    return sorted(
        f"--{name.replace('_', '-')}" for name in names if first.get(name) != second.get(name)
    )
