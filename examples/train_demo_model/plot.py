"""Plots the loss and the exact match of each level from the training log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot(log: Path, out: Path) -> None:
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    # A stopped run continues from its last checkpoint. Of repeated steps, the later ones count.
    rows = [
        r for i, r in enumerate(rows) if all(r["step"] < later["step"] for later in rows[i + 1 :])
    ]
    minutes = [r["minutes"] for r in rows]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True)
    above.plot(minutes, [r["loss"] for r in rows], linewidth=0.8)
    above.set_yscale("log")
    above.set_ylabel("training loss (nats a token)")
    previous = None
    for r in rows:
        if r["level"] != previous:
            above.axvline(r["minutes"], color="0.85", linewidth=0.8)
            below.axvline(r["minutes"], color="0.85", linewidth=0.8)
            label = "repeats" if r["level"] < 0 else f"level {r['level']}"
            above.text(r["minutes"], above.get_ylim()[1], label, rotation=90, va="top", fontsize=7)
            previous = r["level"]
    for task in ("qa", "json", "second_turn", "label", "tool"):
        points = [(r["minutes"], r["match"].get(f"{task}@{r['level']}")) for r in rows]
        below.plot(minutes, [p for _, p in points], linewidth=1, label=task.replace("_", " "))
    below.set_ylabel("exact match at the newest level")
    below.set_xlabel("minutes of training")
    below.set_ylim(0, 1)
    below.legend(loc="lower left", ncols=5, fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("runs/demo"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "loss_curve.png")
    args = parser.parse_args()
    plot(args.run / "log.jsonl", args.out)


if __name__ == "__main__":
    main()
