"""What has been measured so far: one line of JSON each, written at once, and a table made of all of
them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

LINES = "results.jsonl"
TABLE = "results.md"
ALL = "results.json"

PARTS = {
    0: "Device and ceilings",
    1: "Offline, 1,000 prompts with ShareGPT-like lengths",
    2: "Offline, 256 sequences of 100 to 1,024 tokens in and out",
    3: "256 questions about one prefix of 8k tokens",
    4: "Latency by concurrency",
    5: "Constrained against free answers",
    6: "Where a decode step's time goes",
    7: "Kernels one by one",
}


@dataclass(frozen=True)
class Result:
    """One measurement."""

    part: int
    case: str
    figures: Mapping[str, float]
    bound: Mapping[str, float] = field(default_factory=dict)
    """What the roofline allows, under the names that ``figures`` have."""
    note: str = ""


class Results:
    """A folder of results, shared by the processes of a run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def add(self, result: Result) -> None:
        with (self.folder / LINES).open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(f"  part {result.part}, {result.case}: {_inline(result.figures)}", flush=True)

    def read(self) -> list[Result]:
        file = self.folder / LINES
        if not file.exists():
            return []
        return [Result(**json.loads(line)) for line in file.read_text().splitlines()]

    def write_report(self) -> None:
        """The table and the JSON document, from whatever there is."""
        results = self.read()
        document = [asdict(result) for result in results]
        (self.folder / ALL).write_text(json.dumps(document, indent=2) + "\n")
        (self.folder / TABLE).write_text("\n".join(_tables(results)) + "\n")


def _tables(results: list[Result]) -> list[str]:
    lines = []
    for part, title in PARTS.items():
        rows = [result for result in results if result.part == part]
        if not rows:
            continue
        names = list(dict.fromkeys(name for row in rows for name in row.figures))
        bounded = [name for name in names if any(name in row.bound for row in rows)]
        heads = ["case", *names]
        heads += [
            text for name in bounded for text in (f"{name} at the roofline", "measured / roofline")
        ]
        lines += [
            f"## {part}. {title}",
            "",
            _row(heads),
            _row(["---", *["---:"] * (len(heads) - 1)]),
        ]
        for row in rows:
            cells = [row.case, *(_number(row.figures.get(name)) for name in names)]
            for name in bounded:
                bound, measured = row.bound.get(name), row.figures.get(name)
                ratio = measured / bound if bound and measured is not None else None
                cells += [_number(bound), _number(ratio)]
            lines.append(_row(cells))
        notes = [f"{row.case}: {row.note}" for row in rows if row.note]
        lines += ["", *notes, ""] if notes else [""]
    return lines


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _inline(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in figures.items())


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 and abs(value) < 1e7 else f"{value:.3g}"
