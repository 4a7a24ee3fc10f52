"""Rows as a markdown table."""

import statistics
from collections.abc import Sequence
from typing import Any


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line a row; the columns are those of the first."""
    names = list(rows[0])
    lines = [
        "| " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|" + "---|" * len(names),
    ]
    for row in rows:
        cells = [
            f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in names
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def median_and_range(values: Sequence[float], digits: int = 1) -> str:
    """``median (lowest-highest)``; a single value alone."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"
