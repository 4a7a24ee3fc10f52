"""How does a trace look in a terminal? A line a call, its time drawn as a bar."""

from typing import Any

WIDTH = 48
"""Characters of the time axis."""
MOST_LINES = 200
MARKS = {
    "waiting": "·",
    "held": "·",
    "sending": "░",
    "queued": "░",
    "prefill": "▒",
    "first token": "▒",
    "decoding": "█",
    "answering": "█",
}


def text_of(data: dict[str, Any]) -> str:
    rows = [(number, run, call) for number, run in enumerate(data["runs"]) for call in run["calls"]]
    labels = [
        (
            call["branch"] if len(data["runs"]) == 1 else f"{number + 1}/{call['branch']}",
            call["what"],
        )
        for number, _, call in rows[:MOST_LINES]
    ]
    branch_width = max((len(branch) for branch, _ in labels), default=0)
    what_width = max((len(what) for _, what in labels), default=0)
    lines = [summary(data)]
    for (_, run, call), (branch, what) in zip(rows, labels, strict=False):
        bar = _bar(call, run, data["duration"])
        lines.append(
            f"{branch:<{branch_width}}  {what:<{what_width}}  {bar}  {_numbers(call)}".rstrip()
        )
    if len(rows) > MOST_LINES:
        lines.append(f"… and {len(rows) - MOST_LINES} calls more; save the trace to see them.")
    if rows:
        lines.append(
            "· waiting  ░ on the way, queued  ▒ until the first token  █ answering  ✗ failed"
        )
    return "\n".join(lines)


def summary(data: dict[str, Any]) -> str:
    """All in one line."""
    calls = [call for run in data["runs"] for call in run["calls"]]
    branches = sum(len(run["branches"]) for run in data["runs"])
    tokens_in, cached, out = (
        sum(call[name] for call in calls) for name in ("tokens_in", "tokens_cached", "tokens_out")
    )
    parts = [
        data["title"],
        seconds(data["duration"]),
        _count(len(calls), "call"),
        _count(branches, "branch", "branches"),
        f"{tokens_in:,} tokens in ({cached:,} cached)",
        f"{out:,} out",
    ]
    failed = sum(call["error"] is not None for call in calls)
    return " · ".join([*parts, *([f"{failed} failed"] if failed else [])])


def seconds(duration: float) -> str:
    return f"{duration:.2f} s" if duration >= 1 else f"{duration * 1000:.0f} ms"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _bar(call: dict[str, Any], run: dict[str, Any], duration: float) -> str:
    cells = [" "] * WIDTH
    per_cell = max(duration, 1e-9) / WIDTH
    for name, start, end in call["phases"]:
        first, last = (min(int(moment / per_cell), WIDTH - 1) for moment in (start, end))
        for cell in range(first, last + 1):
            cells[cell] = MARKS[name]
    if call["error"] is not None and call["phases"]:
        cells[min(int(call["phases"][-1][2] / per_cell), WIDTH - 1)] = "✗"
    return "".join(cells)


def _numbers(call: dict[str, Any]) -> str:
    start, end = (call["phases"][0][1], call["phases"][-1][2]) if call["phases"] else (0.0, 0.0)
    cached = f" ({call['tokens_cached']} cached)" if call["tokens_cached"] else ""
    tokens = f"{call['tokens_in']}{cached} → {call['tokens_out']}" if call["tokens_in"] else ""
    error = f"  {call['error'].splitlines()[0]:.80}" if call["error"] else ""
    return f"{seconds(end - start):>7}  {tokens}{error}"
