"""Prints rows as markdown tables."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

_T_95 = (0, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantiles of Student's t distribution by degrees of freedom; above 10: the normal distribution's
would be 1.96."""


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


def print_rows(json_file: str | None, title: str, rows: Sequence[Any]) -> None:
    """Print dataclasses of one kind; on stderr where stdout (``-``) is for JSON."""
    written = [
        {k: f"{v:,.4g}" if isinstance(v, float) else v for k, v in asdict(row).items()}
        for row in rows
    ]
    lines = ["", title, "", *markdown(written)]
    print("\n".join(lines), file=sys.stderr if json_file == "-" else sys.stdout, flush=True)


def median_and_range(values: Sequence[float], digits: int = 1) -> str:
    """``median (lowest-highest)``; a single value alone."""
    if len(values) == 1:
        return f"{values[0]:,.{digits}f}"
    low, high = min(values), max(values)
    return f"{statistics.median(values):,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def mean_and_interval(values: Sequence[float], digits: int = 3) -> str:
    """``mean ± half``: half the width of the 95 % interval of the mean; nan for a single value."""
    half = float("nan")
    if len(values) > 1:
        quantile = _T_95[min(len(values) - 1, len(_T_95) - 1)]
        half = quantile * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.{digits}f} ± {half:.{digits}f}"
