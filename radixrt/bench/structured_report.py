"""Computes coverage, wrong answers and times from the records of structured output, as tables and
as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


@dataclass
class Record:
    """The result of one engine for one schema: verdict, times, treatment of the instances."""

    engine: str
    schema_id: str
    backend: str = ""
    """Empty: refused."""
    refusal: str = ""
    keyword: str = ""
    """The keyword to which the refusal is due, if it is known."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    compile_s: float = 0.0
    """Time until a matcher is ready."""
    first_mask_s: float = 0.0
    mask_s: list[float] = field(default_factory=list)
    """One for each token of an instance."""
    tokens: int = 0
    forced: int = 0
    """Tokens that were the only ones allowed."""
    valid: int = 0
    valid_accepted: int = 0
    invalid: int = 0
    invalid_accepted: int = 0
    format_only_accepted: int = 0
    """Accepted instances that are invalid only if ``format`` is asserted."""
    unverified_accepted: int = 0
    """Accepted instances whose label no validator confirms."""
    exhausted: int = 0
    """Instances in whose middle the library ran into a limit of its own."""
    wrong: list[str] = field(default_factory=list)
    """Wrongly treated instances, each with its error."""

    @property
    def covered(self) -> bool:
        """The schema is taken and all its valid instances with it."""
        return bool(self.backend) and self.valid_accepted == self.valid


_COUNTS = (
    "valid", "valid_accepted", "invalid", "invalid_accepted", "format_only_accepted", "unverified_accepted", "exhausted",
)  # fmt: skip
"""Numbers of a record that are summed up."""


def report(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The numbers of each engine."""
    engines = dict.fromkeys(record.engine for record in records)
    return {name: _of_engine([r for r in records if r.engine == name]) for name in engines}


def _of_engine(records: Sequence[Record]) -> dict[str, Any]:
    taken = [record for record in records if record.backend]
    covered = [record for record in taken if record.covered]
    tokens = sum(record.tokens for record in taken)
    return {
        "schemas": len(records),
        "taken": len(taken),
        "covered": len(covered),
        "covered_without_checks": sum(not record.checks for record in covered),
        "with_checks": sum(bool(record.checks) for record in taken),
        "with_a_check_of_the_whole": sum(_checks_whole(record) for record in taken),
        "backends": dict(Counter(record.backend for record in taken)),
        **{name: sum(getattr(record, name) for record in records) for name in _COUNTS},
        "forced_share": sum(record.forced for record in taken) / tokens if tokens else 0.0,
        "compile_ms": _percentiles([record.compile_s for record in taken], 1e3),
        "first_mask_ms": _percentiles([record.first_mask_s for record in taken], 1e3),
        "mask_us": _percentiles([s for record in taken for s in record.mask_s], 1e6),
        "checked_keywords": dict(
            Counter(
                k for r in taken for k in {k for c in r.checks for k in c["keywords"]}
            ).most_common()
        ),
        "refusals": dict(
            Counter(r.keyword or r.refusal[:80] for r in records if not r.backend).most_common(12)
        ),
    }


def _checks_whole(record: Record) -> bool:
    return any(not check["path"] for check in record.checks)


def _percentiles(seconds: Sequence[float], scale: float) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p90, p99, most = np.percentile(np.asarray(seconds) * scale, (50, 90, 99, 100)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": most}


def print_tables(summary: dict[str, dict[str, Any]], console: Console, title: str) -> None:
    """One column an engine."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(style="dim")
    for name in summary:
        table.add_column(name, justify="right")
    for label, cells in _rows(list(summary.values())):
        table.add_row(label, *cells)
    console.print(table)
    for name, numbers in summary.items():
        for label in ("checked_keywords", "refusals"):
            if numbers[label]:
                listed = ", ".join(f"{key} {count}" for key, count in numbers[label].items())
                console.print(
                    f"{name}, {label.replace('_', ' ')}: {listed}", highlight=False, markup=False
                )


def _rows(engines: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    def share(part: str, whole: str) -> list[str]:
        return [f"{e[part]:,} ({e[part] / e[whole]:.2%})" if e[whole] else "-" for e in engines]

    def times(key: str) -> list[str]:
        return [
            " / ".join(f"{e[key][p]:.1f}" for p in ("p50", "p99", "max")) if e[key] else "-"
            for e in engines
        ]

    return [
        ("schemas taken", share("taken", "schemas")),
        ("schemas covered", share("covered", "schemas")),
        ("  without checks", share("covered_without_checks", "schemas")),
        ("  taken with checks", share("with_checks", "schemas")),
        ("  of the whole answer", share("with_a_check_of_the_whole", "schemas")),
        ("valid accepted", share("valid_accepted", "valid")),
        ("invalid accepted", share("invalid_accepted", "invalid")),
        ("  invalid by format alone", share("format_only_accepted", "invalid")),
        ("  label unverified", share("unverified_accepted", "invalid")),
        ("ran into a limit", [f"{e['exhausted']:,}" for e in engines]),
        ("forced tokens", [f"{e['forced_share']:.1%}" for e in engines]),
        ("compile ms, p50/p99/max", times("compile_ms")),
        ("first mask ms, p50/p99/max", times("first_mask_ms")),
        ("mask µs, p50/p99/max", times("mask_us")),
        ("backends", [", ".join(f"{b} {n}" for b, n in e["backends"].items()) for e in engines]),
    ]
